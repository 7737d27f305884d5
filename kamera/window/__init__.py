"""The window: a deque of chunks that makes one live cache."""

from kamera.engines import Recipe
from kamera.patches import GUARANTEES, Guarantee
from kamera.window.anticipating import anticipate
from kamera.window.cascade import Cascade, Dependent
from kamera.window.certificate import Certificate, Estimate, Finding, Grounds, Verdict, library_versions
from kamera.window.certified import Terms, grounds_of
from kamera.window.cutting import cut
from kamera.window.engine_window import EngineAnswer, EngineSlot, EngineUsage, EngineWindow
from kamera.window.events import Event, Listener, Outcome
from kamera.window.file import well_formed
from kamera.window.heads import SHORTEST_HEAD
from kamera.window.measured import MeasuredFile
from kamera.window.memory import WindowMemory
from kamera.window.policy import OnLeave, OnMiss, ReusePolicy, certified_by_default, check_policy, policy_of
from kamera.window.report import Report, SlotReport, Times
from kamera.window.requests import (
    Append,
    Arrange,
    Assemble,
    Condition,
    Edit,
    Evict,
    Insert,
    Recall,
    Reorder,
    Replace,
    Slide,
)
from kamera.window.seats import GLUE, SHORTEST_KEPT
from kamera.window.state import ShownSpan, Slot
from kamera.window.steps import Cost, Offer, Plan, Reason
from kamera.window.trace import Trace, read_events, read_trace
from kamera.window.window import KameraWindow

__all__ = [
    "GLUE",
    "GUARANTEES",
    "SHORTEST_HEAD",
    "SHORTEST_KEPT",
    "Append",
    "Arrange",
    "Assemble",
    "Cascade",
    "Certificate",
    "Condition",
    "Cost",
    "Dependent",
    "Edit",
    "EngineAnswer",
    "EngineSlot",
    "EngineUsage",
    "EngineWindow",
    "Estimate",
    "Event",
    "Evict",
    "Finding",
    "Grounds",
    "Guarantee",
    "Insert",
    "KameraWindow",
    "Listener",
    "MeasuredFile",
    "Offer",
    "OnLeave",
    "OnMiss",
    "Outcome",
    "Plan",
    "Reason",
    "Recall",
    "Recipe",
    "Reorder",
    "Replace",
    "Report",
    "ReusePolicy",
    "ShownSpan",
    "Slide",
    "Slot",
    "SlotReport",
    "Terms",
    "Times",
    "Trace",
    "Verdict",
    "WindowMemory",
    "anticipate",
    "certified_by_default",
    "check_policy",
    "cut",
    "grounds_of",
    "library_versions",
    "policy_of",
    "read_events",
    "read_trace",
    "well_formed",
]
