"""Reuse in a session: how its prompts are cut, and the policy under which their segments are admitted."""

from __future__ import annotations

from kamera.content import Rendered
from kamera.reuse import Discovery, Recut, discovery_of, recut, strict
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, anchor_segments, last_said
from kamera.window import KameraWindow


def stands_apart(window: KameraWindow, reuse: bool) -> bool:
    """Whether each segment is a chunk of its own, since others look for it or its patches are formed."""
    return reuse or window.policy.forms == "always"


def discovery_for(anchors: Anchors, window: KameraWindow, reuse: bool) -> Discovery | None:
    """The discovery of all conversations on the store; None if nothing that it finds may be served."""
    if not (reuse and strict(window.policy).moves):
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
