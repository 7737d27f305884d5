"""What the recipe needs to know of a family: its configuration, its processor, its pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

HIDDEN, LAYERS, HEADS, HEAD_DIM, MLP = 256, 6, 4, 64, 256
CELL = 16
PATCH = CELL // 2


@dataclass(frozen=True)
class Family:
    """One backbone of the testbed.

    `pixels` turns normalised pictures, a list of `[n, 3, height, width]` with one entry for each
    frame of a window, into the model's vision inputs for n windows, window by window. `before` and
    `after` are what the chat template puts around `placeholder`, one of which stands for a cell.
    `axes` is how many position axes the decoder takes.
    """

    name: str
    title: str
    before: str
    placeholder: str
    after: str
    config: Callable[[PreTrainedTokenizerBase], Any]
    processor: Callable[[PreTrainedTokenizerBase, str], Any]
    pixels: Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]
    axes: int = 1

    def build(self, config: Any) -> Any:
        """The model with random weights, drawn from torch's global generator."""
        import transformers

        return getattr(transformers, self.title)(config)


def text_config(tokenizer: PreTrainedTokenizerBase, **more: Any) -> dict[str, Any]:
    """6 layers of 256 with 4 heads of 64, tied embeddings: what all families share."""
    vocabulary = tokenizer.get_vocab()
    return {
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 8192,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "bos_token_id": None,
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
        "tie_word_embeddings": True,
        **more,
    }


def patches(pictures: torch.Tensor, merge: int) -> torch.Tensor:
    """`[n, 3, height, width]` to `[n, patches, 3, 8, 8]`, the patches of a merge block together."""
    n, _, height, width = pictures.shape
    rows, columns = height // PATCH, width // PATCH
    grid = pictures.reshape(n, 3, rows // merge, merge, PATCH, columns // merge, merge, PATCH)
    return grid.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(n, rows * columns, 3, PATCH, PATCH)


def grids(frames: Sequence[torch.Tensor]) -> torch.Tensor:
    """(1, rows, columns) of patches of every picture, window by window: `[n * frames, 3]`."""
    one = [(1, f.shape[-2] // PATCH, f.shape[-1] // PATCH) for f in frames]
    return torch.tensor(one * len(frames[0]))


def by_window(frames: Sequence[torch.Tensor]) -> torch.Tensor:
    """Per-frame tensors `[n, patches, ...]` to one of all patches, window by window."""
    return torch.cat(list(frames), dim=1).flatten(0, 1)


def qwen_pixels(frames: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen's layout: flat patches with the still picture repeated in time."""
    still = [patches(f, 2).unsqueeze(3).expand(-1, -1, -1, 2, -1, -1).flatten(2) for f in frames]
    return {"pixel_values": by_window(still), "image_grid_thw": grids(frames)}
