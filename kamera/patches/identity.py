"""The identity of an engine as objects bear it."""

from __future__ import annotations

from typing import NamedTuple

from kamera.engines import Engine
from kamera.errors import UnsupportedBackbone
from kamera.store import Context, encoding_context


class StoredIdentity(NamedTuple):
    """Fingerprints of a model and of its vision part when a window was made, and its `Engine.origin`."""

    fingerprint: str
    vision: str
    origin: str

    def context(self, anchor: str, tenant: str, kv: str = "as-is") -> Context:
        """The context of KV behind ``anchor``."""
        return Context(self.fingerprint, anchor, tenant, kv, self.origin)

    def encoding_context(self, tenant: str) -> Context:
        """The context of encodings."""
        return encoding_context(self.vision, tenant, self.origin)

    def check(self, backbone: Engine) -> None:
        """Raise ModelChanged or IncompatibleChunk unless the model is still the one of this fingerprint."""
        backbone.check(self.fingerprint)


def identify(backbone: Engine) -> StoredIdentity:
    """Who a model is. Raises ModelChanged, and UnsupportedBackbone if no KV of it can be used again."""
    if backbone.facts.no_reuse:
        raise UnsupportedBackbone(backbone.facts.no_reuse)
    return StoredIdentity(backbone.checked_fingerprint(), backbone.vision_fingerprint, backbone.origin)
