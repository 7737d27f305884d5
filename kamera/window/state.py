"""What an operation changes: replaced as a whole, so an error leaves the old state in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.backbones import Backbone
from kamera.window.slots import Facts, Resident, Slot


@dataclass(frozen=True, eq=False)
class WindowState:
    """The chunks of a window in order.

    ``shift`` (per axis) is how far past its compact place the next chunk goes: zero unless a slide
    kept positions and so left a gap in front.
    """

    residents: tuple[Resident, ...]
    shift: tuple[int, ...]

    def slots(self, anchor_length: int) -> tuple[Slot, ...]:
        """The public view, in order."""
        start, out = anchor_length, []
        for i, resident in enumerate(self.residents):
            out.append(resident.slot(start, leading=i == 0))
            start += resident.facts.length
        return tuple(out)


def compact_positions(
    backbone: Backbone, anchor_ids: torch.Tensor, chunks: Sequence[Facts]
) -> list[torch.Tensor]:
    """The model's own positions of chunks standing behind the anchor, each ``[axes, tokens]``."""
    ids = [anchor_ids, *[c.encoded.input_ids for c in chunks]]
    inputs = [{}, *[c.position_inputs for c in chunks]]
    whole = backbone.positions(ids, inputs)
    return list(whole.split([int(i.shape[0]) for i in ids], dim=1))[1:]


def text_positions(
    backbone: Backbone, anchor_ids: torch.Tensor, chunks: Sequence[Facts], text: torch.Tensor
) -> torch.Tensor:
    """The model's own positions of ``text`` ids behind anchor and chunks, ``[axes, tokens]``."""
    ids = [anchor_ids, *[c.encoded.input_ids for c in chunks], text]
    inputs = [{}, *[c.position_inputs for c in chunks], {}]
    return backbone.positions(ids, inputs)[:, -text.shape[0] :]
