"""vLLM's OpenAI server, also where a package that it calls is an empty stand-in: what hands the application back must hand it
back. A real package is left alone. Arguments: those of `vllm.entrypoints.openai.api_server`.
"""
import importlib
import runpy

# A stand-in answers any name with something, so the module itself is asked for.
sagemaker = importlib.import_module("model_hosting_container_standards.sagemaker")
if getattr(sagemaker, "__file__", None) is None:  # made of nothing, so that vLLM can be imported where no index has it
    sagemaker.bootstrap = lambda app: app

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
