"""Turns of a session of pictures over vLLM: ``python -m benchmarks.vllm``."""
