"""kvtier for vLLM: `kvtier.vllm.connector`. Importing this package does nothing."""
