"""``python -m benchmarks.orders``: what orbit patches cost and keep, over all orders of a window."""
