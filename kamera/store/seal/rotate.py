"""Key rotation: every encrypted object is re-encrypted under the first key, one at a time."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.lower import Lower
from kamera.store.tiers import Tiers

_UPLOAD_SECONDS = 60.0


@dataclass(frozen=True)
class Rotated:
    """Numbers of files ``rewritten`` and of files under the first key already (``current``).

    ``refused``: one line for each file that could not be read, and so keeps its key. If it is empty, the
    other keys are no longer needed.
    """

    rewritten: int
    current: int
    refused: tuple[str, ...]


def rotate(codec: Codec, tiers: Tiers) -> Rotated:
    """Re-encrypt every object under the codec's first key.

    A file or blob is replaced in one step, and only if it still is the one that was read; after an
    interruption, run it again. Raises `StoreError` for a store that is not encrypted, or a service
    that compares nothing when it replaces, `RemoteUnavailable` for one that does not answer.
    """
    if not codec.encrypts:
        raise StoreError("only an encrypted store has keys to rotate: open it with keys=[new, old]")
    counts: Counter[str] = Counter()
    refused: list[str] = []
    for tier in tiers.lower:
        if tier is tiers.remote:
            tiers.flush(_UPLOAD_SECONDS)  # an upload under way was read before its file was re-encrypted
        for name in tier.names():
            try:
                counts[_renew(tier, name, codec)] += 1
            except (CorruptChunk, StoreVersionError, WrongKey) as error:
                refused.append(str(error))
    return Rotated(counts["rewritten"], counts["current"], tuple(refused))


def _renew(tier: Lower, name: str, codec: Codec) -> str:
    """Re-encrypt an object; what became of it: ``rewritten``, ``current`` or ``gone``."""
    while (old := tier.read_file(name)) is not None:
        data = codec.renewed(old.data, name, name)
        if data is None:
            return "current"
        info = codec.read_info(io.BytesIO(data), len(data), name, name)
        if tier.exchange(info, data, old):
            return "rewritten"
        # another writer replaced it meanwhile
    return "gone"
