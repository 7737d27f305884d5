"""Reuse in a session: how its prompts are cut, and the policy under which their segments are admitted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kamera.content import Rendered
from kamera.reuse import (
    Calibration,
    Discovery,
    Recut,
    calibration_of,
    discovery_of,
    recut,
    serves_moved,
    strict,
)
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, anchor_segments, last_said
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow

Reuse = bool | Calibration | str | Path
"""The switch of reuse; a calibration, or its file, switches it on and admits approximate segments."""


class Admitting(NamedTuple):
    """Whether segments are admitted by tier, and the calibration of approximate ones."""

    on: bool
    calibration: Calibration | None

    @classmethod
    def of(cls, reuse: Reuse) -> Admitting:
        """As the switch says; raises the errors of a calibration's file."""
        return cls(bool(reuse), None if isinstance(reuse, bool) else calibration_of(reuse))

    def policy(self, window: KameraWindow) -> ReusePolicy:
        """The policy of a turn's plans."""
        return strict(window.policy) if self.on else window.policy

    def apart(self, window: KameraWindow) -> bool:
        """Whether each segment is a chunk of its own, since others look for it or its patches are formed."""
        return self.on or window.policy.forms == "always"

    def discovery(self, anchors: Anchors, window: KameraWindow) -> Discovery | None:
        """The discovery of all conversations on the store; None if nothing that it finds may be served."""
        if not (self.on and serves_moved(window, self.calibration)):
            return None
        return discovery_of(anchors.backbone, anchors.store)


def cut_anew(discovery: Discovery, prompt: Rendered, before: Layout | None) -> Recut:
    """The prompt cut where parts of it came before.

    Segments that the window has, the system prompt, and the last answer, whose KV may be at hand, stay.
    """
    first = anchor_segments(prompt)
    start = prompt.segments[first].start if first < len(prompt.segments) else prompt.stable
    own = () if before is None else before.prompt.segment_ids()
    return recut(prompt, discovery, start, {*own, *last_said(prompt)})
