"""Stored form of a canonical's KV in codes: its header fields and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from kamera.ops import Blocks, CodedChannel, CodedKV, Grid, Groups, Loss

_PARTS = ("codes", "steps", "lows")


def codes_header(kv: CodedKV) -> dict[str, Any]:
    """Everything but the tensors, JSON-able: ``bits``, ``group``, ``axes`` by channel, ``loss``."""
    return {
        "bits": kv.grid.bits,
        "group": kv.grid.group,
        "axes": {name: channel.axis for block in kv.codes.parts for name, channel in block.items()},
        "loss": asdict(kv.loss),
    }


def codes_tensors(channel: CodedChannel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one channel, each with the last part of its name."""
    for part in _PARTS:
        yield part, getattr(channel, part)


def codes_kv(
    header: Mapping[str, Any],
    groups: Groups,
    channels: Sequence[Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    tokens: int,
) -> CodedKV:
    """The KV of a `codes_header`, of blocks of ``groups`` and ``channels``, and of ``tensors``.

    Raises KeyError for a missing field or tensor, ValueError or TypeError for one that does not fit.
    """
    grid = Grid(header["bits"], header["group"])

    def channel(i: int, name: str) -> CodedChannel:
        codes, steps, lows = (tensors[f"kv/{i}/{name}/{part}"] for part in _PARTS)
        return CodedChannel(codes, steps, lows, tokens, header["axes"][name], grid)

    parts = [{name: channel(i, name) for name in names} for i, names in enumerate(channels)]
    return CodedKV(Blocks(parts, groups), grid, Loss(**header["loss"]))
