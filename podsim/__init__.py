"""Simulated vLLM pods: the OpenAI API, the prefix cache, the KV events and the metrics of vLLM 0.32, without a model.

The demo and the tests run them in place of GPUs. Nothing in here may import `extproc` or `kv_indexer`: podsim is
the independent witness of how vLLM behaves.
"""
