"""Engines that run a model, and the contracts that a window needs of them."""

from kamera.engines.account import Account, Spent, Usage, later, open_accounts
from kamera.engines.base import Engine, LiveKV, Sampling, Span, Written
from kamera.engines.extent import Extent, behind, standing
from kamera.engines.moves import Bytes, Move, Stand, bytes_of, moves
from kamera.engines.precedence import Calls, Cancelled, calls_of, is_later
from kamera.engines.values import FEATURES, Answer, Answers, Named, PositionLimits, Probe, Work

__all__ = [
    "FEATURES",
    "Account",
    "Answer",
    "Answers",
    "Bytes",
    "Calls",
    "Cancelled",
    "Engine",
    "Extent",
    "LiveKV",
    "Move",
    "Named",
    "PositionLimits",
    "Probe",
    "Sampling",
    "Span",
    "Spent",
    "Stand",
    "Usage",
    "Work",
    "Written",
    "behind",
    "bytes_of",
    "calls_of",
    "is_later",
    "later",
    "moves",
    "open_accounts",
    "standing",
]
