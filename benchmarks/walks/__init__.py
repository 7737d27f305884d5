"""What an operation walks through: `python -m benchmarks.walks`."""
