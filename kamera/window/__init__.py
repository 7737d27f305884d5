"""The window: a deque of chunks that makes one live cache."""

from kamera.engines import Recipe
from kamera.window.engine import ANSWER, Dialogue, EngineAnswer, EngineWindow
from kamera.window.events import Event, Listener, Outcome, Trace, read_events, read_trace
from kamera.window.plan import Plan, Reason
from kamera.window.requests import (
    SHORTEST_HEAD,
    Append,
    Arrange,
    Condition,
    Edit,
    Evict,
    Recall,
    Reorder,
    Slide,
    words_before_picture,
)
from kamera.window.run import Report, SlotReport, Times
from kamera.window.save import WINDOW, Saved, SealedFile, refuse_malformed
from kamera.window.slots import GLUE, Slot, WindowMemory
from kamera.window.window import (
    KameraWindow,
    answer_of,
    cut_text,
    former_of,
    keep_first,
    keep_kv,
    keep_orbit,
    logits_of_answers,
    next_token_logits_of,
    respond,
    sequence_of,
    shown_spans,
)

__all__ = [
    "ANSWER",
    "GLUE",
    "SHORTEST_HEAD",
    "WINDOW",
    "Append",
    "Arrange",
    "Condition",
    "Dialogue",
    "Edit",
    "EngineAnswer",
    "EngineWindow",
    "Event",
    "Evict",
    "KameraWindow",
    "Listener",
    "Outcome",
    "Plan",
    "Reason",
    "Recall",
    "Recipe",
    "Reorder",
    "Report",
    "Saved",
    "SealedFile",
    "Slide",
    "Slot",
    "SlotReport",
    "Times",
    "Trace",
    "WindowMemory",
    "answer_of",
    "cut_text",
    "former_of",
    "keep_first",
    "keep_kv",
    "keep_orbit",
    "logits_of_answers",
    "next_token_logits_of",
    "read_events",
    "read_trace",
    "refuse_malformed",
    "respond",
    "sequence_of",
    "shown_spans",
    "words_before_picture",
]
