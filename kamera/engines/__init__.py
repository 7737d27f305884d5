"""Engines that run a model, and the contracts that a window needs of them."""

from kamera.engines.account import Account, Spent, Usage, later, open_accounts
from kamera.engines.base import (
    FEATURES,
    Answer,
    Engine,
    LiveKV,
    Named,
    PositionLimits,
    Probe,
    Span,
    Work,
    Written,
)
from kamera.engines.extent import Extent, behind, standing
from kamera.engines.moves import Bytes, Move, Stand, bytes_of, moves

__all__ = [
    "FEATURES",
    "Account",
    "Answer",
    "Bytes",
    "Engine",
    "Extent",
    "LiveKV",
    "Move",
    "Named",
    "PositionLimits",
    "Probe",
    "Span",
    "Spent",
    "Stand",
    "Usage",
    "Work",
    "Written",
    "behind",
    "bytes_of",
    "later",
    "moves",
    "open_accounts",
    "standing",
]
