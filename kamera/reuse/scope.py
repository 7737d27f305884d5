"""Scope of a segment: its model, its tokenizer and its tenant."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kamera.ops import digest


@dataclass(frozen=True)
class Scope:
    """Meaning and owner of token ids.

    ``model`` is the backbone's fingerprint, ``tokenizer`` a digest of the tokenizer's files (ids of another
    one mean other words), ``tenant`` the owner of the prompts. Nothing is found across scopes.
    """

    model: str
    tokenizer: str
    tenant: str = ""

    @property
    def digest(self) -> str:
        """64 hex digits."""
        return digest("kamera.reuse.scope.v1", self.model, self.tokenizer, self.tenant)

    @property
    def digests(self) -> dict[str, str]:
        """One digest for each field, so that files identify their scope without naming it."""
        return {name: digest(f"kamera.reuse.{name}.v1", value) for name, value in asdict(self).items()}


def segment_key(scope: Scope, ids: bytes, media: str = "") -> str:
    """BLAKE2b key of a segment in a store: its ids (4 bytes each, little-endian) and its media's digest."""
    return digest("kamera.reuse.segment.v1", scope.model, scope.tokenizer, scope.tenant, ids, media)
