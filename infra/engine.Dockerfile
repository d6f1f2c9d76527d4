# vLLM with kvtier's connector (docs/vllm.md). Before: npm run python:wheel. From the checkout's folder:
#   docker build -f infra/engine.Dockerfile --build-arg VLLM=v0.27.0 -t vllm-kvtier:0.1.0 .
# VLLM: a version that docs/vllm.md lists; others are served without the tier, and say so in one line.
ARG VLLM=v0.27.0
FROM vllm/vllm-openai:${VLLM}
COPY build/python/kvtier-*.whl /tmp/
RUN pip install --no-deps /tmp/kvtier-*.whl && rm /tmp/kvtier-*.whl
