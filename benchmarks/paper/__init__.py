"""The paper's claims on today's operators: ``python -m benchmarks.paper``."""
