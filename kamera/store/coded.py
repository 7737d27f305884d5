"""How a canonical's KV in codes stands in an object: what its header says of it, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from kamera.ops import CodedChannel, CodedKV, Grid, Loss

_PARTS = ("codes", "steps", "lows")


def coded_header(kv: CodedKV) -> dict[str, Any]:
    """Everything but the tensors, JSON-able: ``bits``, ``group``, ``axes`` by channel, ``loss``."""
    return {
        "bits": kv.grid.bits,
        "group": kv.grid.group,
        "axes": {name: channel.axis for layer in kv.layers for name, channel in layer.items()},
        "loss": asdict(kv.loss),
    }


def coded_tensors(channel: CodedChannel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one channel by what they are called behind its name."""
    for part in _PARTS:
        yield part, getattr(channel, part)


def coded_kv(
    header: Mapping[str, Any],
    layers: Mapping[int, Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    tokens: int,
) -> CodedKV:
    """The KV of `coded_header` and of ``tensors`` called ``kv/00012/k/codes`` and so on.

    ``layers``: the channels of each layer that is in it, by its number. Raises KeyError for what is
    missing, ValueError or TypeError for what does not fit.
    """
    grid = Grid(header["bits"], header["group"])

    def channel(i: int, name: str) -> CodedChannel:
        codes, steps, lows = (tensors[f"kv/{i:05d}/{name}/{part}"] for part in _PARTS)
        return CodedChannel(codes, steps, lows, tokens, header["axes"][name], grid)

    held = tuple({name: channel(i, name) for name in names} for i, names in layers.items())
    return CodedKV(held, grid, Loss(**header["loss"]))
