"""Engines that run a model, and the contracts that a window needs of them."""

from kamera.engines.base import (
    Continuation,
    Engine,
    HasEngine,
    Identity,
    LiveKV,
    ModelFacts,
    PlainModel,
    PositionLimits,
    Span,
    Work,
    engine_of,
)
from kamera.engines.checkpoint import checkpoint_fingerprint
from kamera.engines.extent import Extent, Extents, chunk_positions, text_start
from kamera.engines.materials import LiveExecutor, read_anchor, read_part
from kamera.engines.moves import Written
from kamera.engines.prompt import (
    Completes,
    EngineCompletion,
    EnginePrompt,
    EngineSampling,
    PromptPicture,
    join_pieces,
)
from kamera.engines.recipe import COMPUTED, Offset, Part, Recipe, RowKey
from kamera.engines.recognise import Placeholder, Recognised, StoredSpan, match
from kamera.engines.work import (
    Account,
    Calls,
    Spent,
    Usage,
    WorkCancelled,
    calls_of,
    cancel_when,
    count_as_later,
    is_later,
    open_accounts,
)

__all__ = [
    "COMPUTED",
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
