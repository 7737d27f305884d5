"""Measurements of `kamera.reuse` as a serve path, and, by ``python -m lab.reuse``, of what it could serve."""
