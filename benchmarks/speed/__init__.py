"""Times of the operator, of windows and of first tokens, arms in turn: ``python -m benchmarks.speed``."""
