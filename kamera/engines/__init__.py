"""Engines that run a model, and the contracts that a window needs of them."""

from kamera.engines.account import Account, Spent, Usage, count_as_later, open_accounts
from kamera.engines.base import Engine, HasEngine, Identity, LiveKV, PlainModel, Span, engine_of
from kamera.engines.checkpoint import checkpoint_fingerprint
from kamera.engines.extent import Extent, Extents, chunk_positions, text_start
from kamera.engines.materials import LiveExecutor, read_anchor, read_part
from kamera.engines.moves import Written
from kamera.engines.precedence import Calls, WorkCancelled, calls_of, cancel_when, is_later
from kamera.engines.prompt import (
    Completes,
    EngineCompletion,
    EnginePrompt,
    EngineSampling,
    PromptPicture,
    join_pieces,
)
from kamera.engines.recipe import Offset, Part, Recipe, RowKey
from kamera.engines.recognise import Placeholder, Recognised, StoredSpan, match
from kamera.engines.values import (
    Continuation,
    ModelFacts,
    PositionLimits,
    Work,
)

__all__ = [
    "Account",
    "Calls",
    "Completes",
    "Continuation",
    "Engine",
    "EngineCompletion",
    "EnginePrompt",
    "EngineSampling",
    "Extent",
    "Extents",
    "HasEngine",
    "Identity",
    "LiveExecutor",
    "LiveKV",
    "ModelFacts",
    "Offset",
    "Part",
    "Placeholder",
    "PlainModel",
    "PositionLimits",
    "PromptPicture",
    "Recipe",
    "Recognised",
    "RowKey",
    "Span",
    "Spent",
    "StoredSpan",
    "Usage",
    "Work",
    "WorkCancelled",
    "Written",
    "calls_of",
    "cancel_when",
    "checkpoint_fingerprint",
    "chunk_positions",
    "count_as_later",
    "engine_of",
    "is_later",
    "join_pieces",
    "match",
    "open_accounts",
    "read_anchor",
    "read_part",
    "text_start",
]
