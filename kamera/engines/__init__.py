"""What runs a model: the contracts a window needs, and the engines that keep them."""

from kamera.engines.base import Engine, LiveKV, Named, PositionLimits, Probe, Span, Work, Written
from kamera.engines.extent import Extent, behind, standing

__all__ = [
    "Engine",
    "Extent",
    "LiveKV",
    "Named",
    "PositionLimits",
    "Probe",
    "Span",
    "Work",
    "Written",
    "behind",
    "standing",
]
