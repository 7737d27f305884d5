"""What Kamera costs and loses, measured: each package is one command with one table.

>>> # python -m benchmarks.fidelity
"""
