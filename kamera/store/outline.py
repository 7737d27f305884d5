"""What a row says of a chunk, so that whoever plans or recognises it reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from kamera.ops import ids_digest

OPENING = 16
"""Token ids of a chunk's beginning that its row repeats."""


@dataclass(frozen=True)
class Outline:
    """A chunk without its tensors.

    ``ids`` is the digest of its token ids (`kamera.ops.ids_digest`), ``opening`` the first `OPENING` of them.
    ``low`` and ``high`` are its lowest and highest position per axis where its KV was computed, ``advance``
    is how far behind its start a text begins that follows it (() if positions are no such sum). ``media``
    are ids by which an engine knows its pictures, in order: an alias, trusted within a tenant.
    """

    ids: str
    opening: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    advance: tuple[int, ...] = ()
    media: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        advance: Sequence[int] = (),
        media: Sequence[str] = (),
    ) -> Outline:
        """The outline of token ids ``[S]`` at ``positions`` ``[axes, S]``."""
        has_tokens = bool(input_ids.shape[0])
        ends = (positions.amin(1).tolist(), positions.amax(1).tolist()) if has_tokens else ((), ())
        opening = tuple(input_ids[:OPENING].tolist())
        whole = ids_digest(input_ids.numpy())
        return cls(whole, opening, tuple(ends[0]), tuple(ends[1]), tuple(advance), tuple(media))

    def check(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Raise ValueError unless it is of these tensors; of tensors without content nothing is compared."""
        if not input_ids.is_meta and self != self.of(input_ids, positions, self.advance, self.media):
            raise ValueError(f"outline {self.ids[:12]} is not that of the token ids and positions")

    def to_header(self) -> dict[str, Any]:
        """The outline as JSON-able."""
        return {name: value if name == "ids" else list(value) for name, value in asdict(self).items()}

    @classmethod
    def from_header(cls, said: Mapping[str, Any]) -> Outline:
        """The inverse of `to_header`. Raises ValueError, KeyError or TypeError for what it did not write."""
        if said.keys() != {field.name for field in fields(cls)}:
            raise ValueError(f"an outline of {sorted(said)}")
        if not isinstance(said["ids"], str) or not all(isinstance(m, str) for m in said["media"]):
            raise ValueError("an outline's ids and media must be text")
        numbers = [n for name in ("opening", "low", "high", "advance") for n in said[name]]
        if not all(type(number) is int for number in numbers):
            raise ValueError("an outline's places must be whole numbers")
        lists = {name: tuple(value) for name, value in said.items() if name != "ids"}
        return cls(said["ids"], **lists)
