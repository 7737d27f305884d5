"""What stands in a benchmark's windows: noise, cut so that a chunk has the tokens asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from benchmarks.shapes import FIRST_WORD, IMAGE, VISION_END, VISION_START, Preset
from kamera import Chunk, Patch
from kamera.engines.hf import HfEngine, forwards
from kamera.ops import KV, compress, kv_bytes, kv_of
from kamera.ops.layout import Layout

_DIRECTIONS = 96  # of a deficit's spectrum; the k-th is 2^(-k/16) as strong as the first
SHARE = 0.12
"""Bytes of a patch, as a share of the chunk's KV: the default."""


def words(backbone: HfEngine, count: int, seed: int = 0) -> torch.Tensor:
    """``count`` ordinary token ids, int64 ``[tokens]``; other seeds give other ids."""
    size = backbone.model.get_input_embeddings().weight.shape[0]
    return torch.randint(FIRST_WORD, size, (count,), generator=torch.Generator().manual_seed(seed))


def picture_chunk(backbone: HfEngine, preset: Preset, tokens: int, seed: int = 0) -> Chunk:
    """A chunk of exactly ``tokens`` tokens: the largest near-square picture that fits, and text.

    Equal seeds give equal chunks.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    room = max(0, tokens - 3)  # a wrapper of two and at least one word
    rows = math.isqrt(room)
    columns = room // rows if rows else 0
    inputs: dict[str, torch.Tensor] = {}
    ids = torch.empty(0, dtype=torch.long)
    if rows:
        start, end = torch.tensor([VISION_START]), torch.tensor([VISION_END])
        ids = torch.cat((start, torch.full((rows * columns,), IMAGE), end))
        patch, grid = int(preset.vision["patch_size"]), 4 * rows * columns
        shape: tuple[int, ...] = (grid, 3, patch, patch)
        if preset.pictures == "patches":
            shape = (grid, 3 * int(preset.vision["temporal_patch_size"]) * patch**2)
        inputs = {
            "pixel_values": torch.randn(shape, generator=generator),
            "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]]),
        }
    ids = torch.cat((ids, words(backbone, tokens - len(ids), seed)))
    return backbone.chunk_from_tensors(ids, label=f"noise {seed}", **inputs)


def noise_kv(backbone: HfEngine, tokens: int, seed: int) -> KV:
    """Normal noise in the shape of a span's KV, where the model keeps it."""
    made = forwards.allocate_kv(backbone, tokens)
    for i, layer in enumerate(made):
        for j, tensor in enumerate(layer.values()):
            generator = torch.Generator(tensor.device).manual_seed(seed * 10_000 + i * 10 + j)
            tensor.normal_(generator=generator)
    return made


def noise_patch(canonical: KV, layout: Layout) -> Patch:
    """A patch of `SHARE` of the chunk's bytes, of a random deficit of falling spectrum."""
    deltas: list[Mapping[str, torch.Tensor]] = []
    for i, (spec, held) in enumerate(zip(layout, canonical, strict=True)):
        layer = {}
        for c in spec.channels:
            tokens, where = held[c.name].shape[1], held[c.name].device
            count = min(_DIRECTIONS, tokens, c.features)
            generator = torch.Generator(where).manual_seed(i)
            strong = 2.0 ** (-torch.arange(count, device=where) / 16)
            left = torch.randn(tokens, count, generator=generator, device=where) * strong
            right = torch.randn(count, c.features, generator=generator, device=where)
            layer[c.name] = left @ right * (0.01 if i else 0.0)  # the first layer never has a deficit
        deltas.append(layer)
    return compress(kv_of(deltas, canonical.groups), layout, int(SHARE * kv_bytes(canonical))).patch
