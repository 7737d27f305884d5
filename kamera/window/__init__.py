"""The window: a deque of chunks that makes one live cache."""

from kamera.engines import Recipe
from kamera.window.asking import ANSWER
from kamera.window.engine_prompts import Dialogue
from kamera.window.engine_window import EngineAnswer, EngineSlot, EngineWindow
from kamera.window.events import Event, Listener, Outcome, Trace, read_events, read_trace
from kamera.window.file import Saved, SealedFile, refuse_malformed
from kamera.window.functions import (
    answer_of,
    cut_text,
    former_of,
    keep_first,
    keep_kv,
    keep_orbit,
    logits_of_answers,
    next_token_logits_of,
    policy_in_force,
    respond,
    sequence_of,
    shown_spans,
)
from kamera.window.heads import SHORTEST_HEAD
from kamera.window.memory import WindowMemory
from kamera.window.report import Report, SlotReport, Times
from kamera.window.requests import Append, Arrange, Condition, Edit, Evict, Recall, Reorder, Slide
from kamera.window.seats import GLUE
from kamera.window.state import ShownSpan, Slot
from kamera.window.steps import Cost, Plan, Reason
from kamera.window.window import KameraWindow

__all__ = [
    "ANSWER",
    "GLUE",
    "SHORTEST_HEAD",
    "Append",
    "Arrange",
    "Condition",
    "Cost",
    "Dialogue",
    "Edit",
    "EngineAnswer",
    "EngineSlot",
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
    "ShownSpan",
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
    "policy_in_force",
    "read_events",
    "read_trace",
    "refuse_malformed",
    "respond",
    "sequence_of",
    "shown_spans",
]
