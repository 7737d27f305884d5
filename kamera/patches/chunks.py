"""A chunk independent of its place, and a copy of its KV as the model computed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kamera.content import Encoded
from kamera.ops import KV, Guarantee, Patch, Proof, SampleSize


@dataclass(frozen=True, eq=False)
class Facts:
    """A chunk independent of its place: enough to prefill it again without its pixels.

    ``heads`` are other texts that begin with as many equal tokens as is said, the most first.
    """

    chunk_id: str
    encoded: Encoded
    label: str
    heads: tuple[tuple[str, int], ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.encoded.num_tokens

    @property
    def position_inputs(self) -> Mapping[str, torch.Tensor]:
        """Inputs besides token ids that determine the chunk's positions."""
        return self.encoded.position_inputs

    @property
    def reads(self) -> frozenset[str]:
        """Ids of the chunks whose stored canonicals its own is read or made from."""
        return frozenset((self.chunk_id, *(head for head, _ in self.heads)))


@dataclass(frozen=True, eq=False)
class Copy:
    """KV as the model computed it at some place, never re-rotated; every move starts from it.

    ``kv`` was computed at ``positions`` ``[axes, tokens]``; ``patch`` conditions it when it is a canonical.
    ``guarantee`` is that of the KV behind exactly ``antecedents``, which are named as in `Seats.lineage`.
    ``lossy``: it was decoded from codes, so it is close to the model's KV and never equal to it. ``proof`` is
    the patch's, if it was served for it, ``sample`` as in `Source`. ``content`` is the digest under which
    this very KV is stored, "" for none (`kamera.window.recipe`).
    """

    kv: KV
    positions: torch.Tensor
    patch: Patch | None
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    canonical: bool
    lossy: bool = False
    proof: Proof | None = None
    sample: SampleSize | None = None
    content: str = ""
