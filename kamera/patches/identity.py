"""The identity of an engine as objects bear it: fingerprints, and what the model answers to the probe."""

from __future__ import annotations

from typing import NamedTuple

from kamera.engines import FEATURES, Engine
from kamera.errors import UnsupportedBackbone
from kamera.store import Context, encoding_context, probe_text

EVERY = 64
"""Operations of a window and its forks after which the model is asked the probe again."""


class Asked:
    """The last time that a window's model was asked the probe, after ``moves`` changes seen in it."""

    def __init__(self, moves: int) -> None:
        self._moves = moves
        self._calls = 0

    def is_due(self, moves: int) -> bool:
        """True if the model is to be asked again; called once an operation."""
        self._calls += 1
        return moves != self._moves or self._calls >= EVERY


class Identity(NamedTuple):
    """Fingerprints of a model and of its vision part, and what each answers to the probe (`probe_text`)."""

    fingerprint: str
    vision: str
    probe: str
    vision_probe: str

    def context(self, anchor: str, tenant: str, kv: str = "as-is") -> Context:
        """The context of KV behind ``anchor``."""
        return Context(self.fingerprint, anchor, tenant, kv, self.probe)

    def encoding_context(self, tenant: str) -> Context:
        """The context of encodings."""
        return encoding_context(self.vision, tenant, self.vision_probe)


def identify(backbone: Engine) -> Identity:
    """Ask a model the probe, and return who it is.

    This is done for every new window before anything stored is looked up for it. Raises ComputationChanged,
    and UnsupportedBackbone for a model of which no KV can be used again.
    """
    if backbone.no_reuse:
        raise UnsupportedBackbone(backbone.no_reuse)
    probe = backbone.probe
    answers = dict(probe.answers())
    features = {name: answers.pop(name) for name in (FEATURES,) if name in answers}
    return Identity(
        backbone.fingerprint,
        backbone.vision_fingerprint,
        probe_text(answers, probe.tolerance),
        probe_text(features, probe.tolerance),
    )
