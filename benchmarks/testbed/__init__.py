"""The recipe that trains the shipped backbone: ``python -m benchmarks.testbed --out DIR``."""
