"""What stands in a benchmark's windows: noise, cut so that a chunk has the tokens asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kamera.content import Chunk
from kamera.engines.hf import HfEngine, forwards
from kamera.ops import KV, Patch, kv_of
from kamera.ops.layout import Layout
from kamera.trust import ReusePolicy
from lab.speed.shape import FIRST_WORD, IMAGE, VISION_END, VISION_START, Preset

_DIRECTIONS = 96  # of a deficit's spectrum; the k-th is 2^(-k/16) as strong as the first


def words(backbone: HfEngine, count: int, seed: int = 0) -> torch.Tensor:
    """``count`` ordinary token ids, int64 ``[tokens]``; other seeds give other ids."""
    size = backbone.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, size, (count,), generator=generator)


def picture_chunk(backbone: HfEngine, preset: Preset, tokens: int, seed: int = 0) -> Chunk:
    """A chunk of exactly ``tokens`` tokens, as many of them of one picture as its family's sizes allow.

    The picture is the largest near-square one that fits with its wrapper; text fills the rest. LLaVA's
    pictures have 576 tokens each, so a shorter chunk has none. Equal seeds give equal chunks.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    inputs: dict[str, torch.Tensor] = {}
    if preset.pictures == "square":
        each = int(preset.config["image_seq_length"])
        pictures = tokens // (each + 1)
        side = int(preset.vision["image_size"])
        if pictures:
            inputs["pixel_values"] = torch.randn(pictures, 3, side, side, generator=generator)
        spans = [torch.full((each,), IMAGE)] * pictures
    else:
        room = max(0, tokens - 3)  # a wrapper of two and at least one word
        rows = math.isqrt(room)
        columns = room // rows if rows else 0
        spans = []
        if rows:
            start, end = torch.tensor([VISION_START]), torch.tensor([VISION_END])
            spans = [torch.cat((start, torch.full((rows * columns,), IMAGE), end))]
            inputs = _patches(preset, rows * 2, columns * 2, generator)
    filled = sum(int(s.shape[0]) for s in spans)
    ids = torch.cat((*spans, words(backbone, tokens - filled, seed)))
    return backbone.chunk_from_tensors(ids, label=f"noise {seed}", **inputs)


def _patches(preset: Preset, rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    patch = int(preset.vision["patch_size"])
    shape: tuple[int, ...] = (rows * columns, 3, patch, patch)
    if preset.pictures == "patches":
        frames = int(preset.vision["temporal_patch_size"])
        shape = (rows * columns, 3 * frames * patch * patch)
    return {
        "pixel_values": torch.randn(shape, generator=generator),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


def noise_kv(backbone: HfEngine, tokens: int, seed: int) -> KV:
    """Normal noise in the shape of a span's KV, where the model keeps it."""
    made = forwards.allocate_kv(backbone, tokens)
    for i, layer in enumerate(made):
        for j, tensor in enumerate(layer.values()):
            generator = torch.Generator(tensor.device).manual_seed(seed * 10_000 + i * 10 + j)
            tensor.normal_(generator=generator)
    return made


def noise_patch(canonical: KV, layout: Layout) -> Patch:
    """A patch as the default policy's budget cuts it from a random deficit of this chunk."""
    deltas: list[Mapping[str, torch.Tensor]] = []
    for i, (spec, held) in enumerate(zip(layout, canonical, strict=True)):
        layer = {}
        for c in spec.channels:
            own = held[c.name]
            tokens, where = own.shape[1], own.device
            count = min(_DIRECTIONS, tokens, c.features)
            generator = torch.Generator(where).manual_seed(i)
            strong = 2.0 ** (-torch.arange(count, device=where) / 16)
            left = torch.randn(tokens, count, generator=generator, device=where) * strong
            right = torch.randn(count, c.features, generator=generator, device=where)
            layer[c.name] = left @ right * (0.01 if i else 0.0)
        deltas.append(layer)
    whole = kv_of(deltas, canonical.groups)
    return ReusePolicy().budget.form(whole, layout, canonical).formed.patch
