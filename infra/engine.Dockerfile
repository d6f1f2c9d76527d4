# vLLM with kvtier's connector (docs/vllm.md). From the checkout's folder, where .dockerignore leaves out build/:
#   npm run python:wheel
#   docker build -f infra/engine.Dockerfile --build-arg VLLM=v0.27.0 -t vllm-kvtier:0.1.0 build/python
# VLLM: a version that docs/vllm.md lists, where it stands which of them were run; others are served without the tier, and say so in one
# line.
ARG VLLM=v0.27.0
FROM vllm/vllm-openai:${VLLM}
COPY kvtier-*.whl /tmp/
RUN pip install --no-deps /tmp/kvtier-*.whl && rm /tmp/kvtier-*.whl
# Required below vLLM 0.29 and with xxhash: without it each process names blocks by lot, so that no other one finds them. The same number in all engines.
ENV PYTHONHASHSEED=0
