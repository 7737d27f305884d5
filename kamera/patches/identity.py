"""The identity of an engine as objects bear it: fingerprints, and what the model answers to the probe."""

from __future__ import annotations

from typing import NamedTuple

from kamera.engines import FEATURES, Engine
from kamera.errors import UnsupportedBackbone
from kamera.store import Context, encoding_context
from kamera.store.probes import told


class Identity(NamedTuple):
    """Fingerprints of a model and of its vision part, and what each answers to the probe (`probes.told`)."""

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
        told(answers, probe.tolerance),
        told(features, probe.tolerance),
    )
