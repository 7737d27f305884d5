"""The HTTP server under load, and under agents' clients: ``python -m benchmarks.serve``."""
