"""Events that a window sends to its listeners, one for each operation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kamera.window.report import Report
from kamera.window.slots import Slot
from kamera.window.steps import Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One operation that succeeded: its plan (None for `form_orbit`, which plans nothing), its report.

    ``anchor`` is the digest of the anchor tokens, ``before`` the slots before the operation; the report has
    those after it. ``time`` is seconds since 1970.
    """

    operation: str
    time: float
    anchor: str
    plan: Plan | None
    report: Report
    before: tuple[Slot, ...]


Listener = Callable[[Event], object]


def tell(listeners: tuple[Listener, ...], event: Event) -> None:
    """Call each listener; an error in one is logged as a warning and never fails the operation."""
    for listener in listeners:
        try:
            listener(event)
        except Exception as error:
            logger.warning("an event of %s was not heard: %s", event.operation, error)
