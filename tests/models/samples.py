"""Inputs for the tiny models: token ids with real pixels, as the families' processors shape them.

`sample(name)` is one chunk: text, a wrapped picture, text. Families that see no pictures get text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kamera.content import Chunk
from kamera.content.chunk import TOKEN_TYPES
from kamera.engines.hf import HfEngine
from tests.models.tiny import IMAGE, VIDEO, VISION_END, VISION_START

Inputs = dict[str, torch.Tensor]


class Sample(NamedTuple):
    """Token ids ``[tokens]`` and the model's keyword arguments for them."""

    input_ids: torch.Tensor
    vision_inputs: Inputs


def text_ids(n: int, seed: int = 0) -> torch.Tensor:
    """``n`` ordinary token ids (none of them special in any family)."""
    return torch.randint(3, 140, (n,), generator=torch.Generator().manual_seed(seed))


def sample(name: str, seed: int = 0, *, wide: bool = False) -> Sample:
    """Text, one wrapped picture and text for the family ``name``; text alone for text-only families.

    ``wide`` gives a picture of another size, for the families that know several.
    """
    if name not in _PICTURES:
        return Sample(text_ids(9, seed), {})
    tokens, shapes, sizes = _WIDE.get(name, _PICTURES[name]) if wide else _PICTURES[name]
    generator = torch.Generator().manual_seed(seed + 1000)
    inputs = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    inputs |= {n: torch.tensor(size) for n, size in sizes.items()}
    if name == "gemma4_vl":  # pixels in 0..1, with a place for each patch
        inputs["pixel_values"] = inputs["pixel_values"].sigmoid()
        places = torch.tensor([[[x, y] for y in range(4) for x in range(4)]])
        inputs["image_position_ids"] = torch.where(torch.arange(16)[:, None] < 4 * tokens, places, -1)
    ids = _wrapped(tokens, IMAGE, seed)
    if name == "ernie":  # what opens and closes a picture is routed as the picture
        seen = torch.tensor([IMAGE, VISION_START, VISION_END])
        inputs["moe_mm_token_type_ids"] = torch.isin(ids, seen).long()
    return Sample(ids, inputs)


def video_sample(name: str, seed: int = 0, seconds: float = 1.0, steps: int = 3) -> Sample:
    """Text, one clip of ``steps`` temporal steps (2 x 2 tokens each) and text.

    ``seconds`` is the time between steps, for the families whose positions follow the clock.
    """
    generator = torch.Generator().manual_seed(seed + 2000)
    grid = torch.tensor([[steps, 4, 4]])
    pixels = torch.randn(steps * 16, 3 * 2 * 16, generator=generator)
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
    if name in ("qwen3_vl", "qwen3_vl_moe"):  # a timestamp in text before each frame
        frames = [
            torch.cat((text_ids(3, seed + i), _tokens(VISION_START), _tokens(VIDEO, 4), _tokens(VISION_END)))
            for i in range(steps)
        ]
        return Sample(torch.cat((text_ids(2, seed), *frames, text_ids(4, seed + 1))), inputs)
    if name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([seconds])
    if name in ("qwen2_5_omni", "qwen3_omni"):
        inputs["video_second_per_grid"] = torch.tensor([seconds])
    return Sample(_wrapped(4 * steps, VIDEO, seed), inputs)


def chunk(backbone: HfEngine, given: Sample, label: str = "") -> Chunk:
    """The sample as a chunk of ``backbone``."""
    return backbone.chunk_from_tensors(given.input_ids, label=label, **given.vision_inputs)


def join(chunks: Sequence[Chunk]) -> tuple[torch.Tensor, Inputs]:
    """Chunks one after another, as one call of the plain model: ids ``[1, tokens]`` and its inputs."""
    ids = torch.cat([c.input_ids for c in chunks])[None]
    types: Inputs = {}
    for name in dict.fromkeys(n for c in chunks for n in c.inputs if n in TOKEN_TYPES):
        parts = [c.inputs.get(name, torch.zeros_like(c.input_ids)) for c in chunks]
        types[name] = torch.cat(parts)[None]
    return ids, types | joined_media([c.inputs for c in chunks])


def joined_media(given: Sequence[Mapping[str, torch.Tensor]]) -> Inputs:
    """Inputs of pictures and clips one after another, as those of one sequence; per-token ones left out."""
    joined: Inputs = {}
    for name in dict.fromkeys(n for inputs in given for n in inputs if n not in TOKEN_TYPES):
        held = [inputs[name] for inputs in given if name in inputs]
        # SmolVLM and Idefics3 hold the pictures of a sequence in the second dimension
        tiled = held[0].dim() == 5 and min(one.shape[1] for one in held) == 1
        joined[name] = torch.cat(held, dim=1 if tiled else 0)
    return joined


def _tokens(token: int, count: int = 1) -> torch.Tensor:
    return torch.full((count,), token)


def _wrapped(count: int, placeholder: int, seed: int) -> torch.Tensor:
    return torch.cat(
        (
            text_ids(2, seed),
            _tokens(VISION_START),
            _tokens(placeholder, count),
            _tokens(VISION_END),
            text_ids(4, seed + 1),
        )
    )


_Shapes = dict[str, tuple[int, ...]]
_Sizes = dict[str, list[list[int]] | list[int]]
_GRID: _Sizes = {"image_grid_thw": [[1, 4, 4]]}
_QWEN: tuple[int, _Shapes, _Sizes] = (4, {"pixel_values": (16, 3 * 2 * 16)}, _GRID)
_SQUARE: _Shapes = {"pixel_values": (1, 3, 16, 16)}

# placeholder tokens; float inputs by shape; integer inputs by value
_PICTURES: dict[str, tuple[int, _Shapes, _Sizes]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen2_5_omni": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_omni": _QWEN,
    "glm4v": _QWEN,
    "glm46v": _QWEN,
    "ernie": (4, {"pixel_values": (16, 3 * 16)}, _GRID),
    "paddleocr_vl": (4, {"pixel_values": (16, 3, 4, 4)}, _GRID),
    "kimi_k25": (4, {"pixel_values": (16, 3, 4, 4)}, _GRID),
    "video_llama_3": (4, {"pixel_values": (16, 3 * 16)}, {**_GRID, "image_merge_sizes": [2]}),
    "deepseek_vl": (16, _SQUARE, {}),
    "llava": (16, _SQUARE, {}),
    "llava_llama3": (16, _SQUARE, {}),
    "llava_yarn": (16, _SQUARE, {}),
    # the whole picture, one tile, and a newline token per tile row
    "llava_onevision": (36, {"pixel_values": (1, 2, 3, 16, 16)}, {"image_sizes": [[16, 16]]}),
    "smolvlm": (4, {"pixel_values": (1, 1, 3, 16, 16)}, {}),
    "idefics3": (4, {"pixel_values": (1, 1, 3, 16, 16)}, {}),
    "internvl": (4, _SQUARE, {}),
    "gemma3": (4, _SQUARE, {}),
    "gemma4_vl": (4, {"pixel_values": (1, 16, 3 * 16)}, {}),
    "mistral3": (4, _SQUARE, {"image_sizes": [[16, 16]]}),
    "ministral3": (4, _SQUARE, {"image_sizes": [[16, 16]]}),
}

# a picture twice as wide (or of two tiles); for the last ones half as high, in a frame of the same size
_WIDE_GRID: _Sizes = {"image_grid_thw": [[1, 4, 8]]}
_WIDE: dict[str, tuple[int, _Shapes, _Sizes]] = {
    **{
        name: (8, {"pixel_values": (32, 3 * 2 * 16)}, _WIDE_GRID)
        for name, of in _PICTURES.items()
        if of is _QWEN
    },
    "ernie": (8, {"pixel_values": (32, 3 * 16)}, _WIDE_GRID),
    "paddleocr_vl": (8, {"pixel_values": (32, 3, 4, 4)}, _WIDE_GRID),
    "kimi_k25": (8, {"pixel_values": (32, 3, 4, 4)}, _WIDE_GRID),
    "video_llama_3": (8, {"pixel_values": (32, 3 * 16)}, {**_WIDE_GRID, "image_merge_sizes": [2]}),
    "smolvlm": (8, {"pixel_values": (1, 2, 3, 16, 16)}, {}),
    "idefics3": (8, {"pixel_values": (1, 2, 3, 16, 16)}, {}),
    "internvl": (8, {"pixel_values": (2, 3, 16, 16)}, {}),
    "gemma4_vl": (2, {"pixel_values": (1, 16, 3 * 16)}, {}),
    "llava_onevision": (26, {"pixel_values": (1, 2, 3, 16, 16)}, {"image_sizes": [[8, 16]]}),
    "mistral3": (2, _SQUARE, {"image_sizes": [[8, 16]]}),
    "ministral3": (2, _SQUARE, {"image_sizes": [[8, 16]]}),
}

PICTURED = tuple(_PICTURES)
"""Families with a vision tower."""
