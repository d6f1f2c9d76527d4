"""KV of SGLang in a cache node: ``kvtier.sglang.storage.KvtierStorage``, named by ``--hicache-storage-backend dynamic`` (docs/sglang.md)."""
