"""What the store costs: `python -m benchmarks.store`."""
