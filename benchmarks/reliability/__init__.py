"""Killed writers, failing calls and damaged files: ``python -m benchmarks.reliability``."""
