"""What each way of serving a chunk loses on real language weights: ``python -m benchmarks.fidelity``."""
