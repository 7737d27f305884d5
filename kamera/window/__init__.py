"""The window: a deque of chunks that makes one live cache."""

from kamera.window.certificate import Certificate
from kamera.window.memory import WindowMemory
from kamera.window.policy import GUARANTEES, Guarantee, ReusePolicy
from kamera.window.report import Report, SlotReport
from kamera.window.slots import Slot
from kamera.window.window import KameraWindow

__all__ = [
    "GUARANTEES",
    "Certificate",
    "Guarantee",
    "KameraWindow",
    "Report",
    "ReusePolicy",
    "Slot",
    "SlotReport",
    "WindowMemory",
]
