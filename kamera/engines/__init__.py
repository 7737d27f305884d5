"""Engines that run a model, and the contracts that a window needs of them."""

from kamera.engines.account import Account, Spent, Usage, later, open_accounts
from kamera.engines.base import Engine, LiveKV, Sampling, Span, Written
from kamera.engines.extent import Extent, behind, standing
from kamera.engines.moves import Bytes, Move, Stand, bytes_of, moves
from kamera.engines.precedence import Calls, WorkCancelled, calls_of, is_later
from kamera.engines.values import FEATURES, Answers, Continuation, ModelName, PositionLimits, Probe, Work

__all__ = [
    "FEATURES",
    "Account",
    "Answers",
    "Bytes",
    "Calls",
    "Continuation",
    "Engine",
    "Extent",
    "LiveKV",
    "ModelName",
    "Move",
    "PositionLimits",
    "Probe",
    "Sampling",
    "Span",
    "Spent",
    "Stand",
    "Usage",
    "Work",
    "WorkCancelled",
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
