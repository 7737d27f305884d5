"""The fused operator: a stored chunk written into the live cache in one pass (docs/how-it-works.md)."""

from kamera.ops.kernels.dispatch import Path, serve

__all__ = ["Path", "serve"]
