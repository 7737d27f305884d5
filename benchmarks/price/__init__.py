"""The price of turns and edits, counted by hooks on the model: ``python -m benchmarks.price``."""
