"""What runs a model: the contracts a window needs, and the engines that keep them."""

from kamera.engines.extent import Extent, behind, standing

__all__ = ["Extent", "behind", "standing"]
