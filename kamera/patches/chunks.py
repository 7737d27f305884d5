"""A chunk apart from any place, and a KV of it that the model computed somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kamera.content import Encoded
from kamera.ops import KV, Patch
from kamera.patches.guarantee import Guarantee


@dataclass(frozen=True, eq=False)
class Facts:
    """What a chunk is, apart from any place: enough to prefill it again without its pixels."""

    chunk_id: str
    encoded: Encoded
    label: str

    @property
    def length(self) -> int:
        """Tokens."""
        return self.encoded.num_tokens

    @property
    def position_inputs(self) -> Mapping[str, torch.Tensor]:
        """What fixes its positions besides token ids."""
        return self.encoded.position_inputs


@dataclass(frozen=True, eq=False)
class Copy:
    """A KV the model computed somewhere, never turned since; every move starts from it.

    ``kv`` stands at ``positions`` ``[axes, tokens]``; ``patch`` conditions it when it is a canonical.
    ``guarantee`` is what it is worth behind exactly ``antecedents``, which are named as in
    `Seats.lineage`. ``lossy`` says that it came out of codes: it is close to what the model computed,
    never equal.
    """

    kv: KV
    positions: torch.Tensor
    patch: Patch | None
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    canonical: bool
    lossy: bool = False
