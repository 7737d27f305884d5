"""Engines that run a model, and the contracts that a window needs of them."""

from kamera.engines.base import FEATURES, Engine, LiveKV, Named, PositionLimits, Probe, Span, Work, Written
from kamera.engines.extent import Extent, behind, standing
from kamera.engines.moves import Bytes, Move, Stand, bytes_of, moves

__all__ = [
    "FEATURES",
    "Bytes",
    "Engine",
    "Extent",
    "LiveKV",
    "Move",
    "Named",
    "PositionLimits",
    "Probe",
    "Span",
    "Stand",
    "Work",
    "Written",
    "behind",
    "bytes_of",
    "moves",
    "standing",
]
