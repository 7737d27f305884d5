"""Windows of several episodes with many questions each, packed into one training batch.

All episodes of a batch share a layout, so they share token ids up to the tags, positions and the
attention mask. A question block `{question}<|im_end|>\\n<|im_start|>assistant\\n{answer}` sees the
anchor, the chunks and itself, and has the positions it would have as the only question: training
on a packed window equals inference on a window with one question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from .model import encode_images, to_unit
from .render import pixels
from .world import BLANK, DEFAULTS, Episode, Frame, Question

Span = tuple[int, int]
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"


@lru_cache(maxsize=4096)
def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text).input_ids)


@dataclass(frozen=True)
class Batch:
    """`b` windows of `s` tokens, `q` questions each.

    `input_ids` `[b, s]`, `positions` `[3, 1, s]`, `mask` `[1, 1, s, s]` (True = attend),
    `read` `[q]` the tokens whose next token is the answer, `answers` `[b, q]` token ids, `spans`
    the tokens of each frame's chunk, `image_spans` those of its picture alone.
    """

    episodes: tuple[Episode, ...]
    questions: tuple[tuple[Question, ...], ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    read: torch.Tensor
    answers: torch.Tensor
    spans: tuple[Span, ...]
    image_spans: tuple[Span, ...]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of the first window: kinds and sizes are those of all."""
        return self.episodes[0].frames

    @property
    def end(self) -> int:
        """The first token after the last chunk."""
        return self.spans[-1][1]


def pack(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    questions: Sequence[Sequence[Question]],
    system: str,
) -> Batch:
    """Pack episodes of one layout and their questions (as many for each) under a system prompt."""
    frames = episodes[0].frames
    prefix = list(_ids(tokenizer, f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"))
    spans, image_spans, grids = [], [], []
    vocabulary = tokenizer.get_vocab()
    start, end, pad = (vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end", "image_pad"))
    for frame in frames:
        rows, columns = len(frame.glyphs), len(frame.glyphs[0])
        first = len(prefix)
        prefix += [start] + [pad] * (rows * columns) + [end, *_ids(tokenizer, frame.caption)]
        spans.append((first, len(prefix)))
        image_spans.append((first + 1, first + 1 + rows * columns))
        grids.append((1, 2 * rows, 2 * columns))

    suffix = _ids(tokenizer, SUFFIX)
    blocks = [
        [(*_ids(tokenizer, one.text), *suffix, *_ids(tokenizer, one.answer)) for one in asked]
        for asked in questions
    ]
    length, count = len(blocks[0][0]), len(blocks[0])
    body = torch.tensor(blocks)
    ids = torch.cat([torch.tensor(prefix).expand(len(episodes), -1), body.flatten(1)], dim=1)

    single = torch.tensor([[*prefix, *blocks[0][0]]])
    positions, _ = model.model.get_rope_index(
        single, mm_token_type_ids=(single == pad).int(), image_grid_thw=torch.tensor(grids)
    )
    tail = positions[:, :, len(prefix) :].repeat(1, 1, count)
    positions = torch.cat([positions[:, :, : len(prefix)], tail], dim=2)

    block = torch.cat([torch.full((len(prefix),), -1), torch.arange(count).repeat_interleave(length)])
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mask = causal & ((block[None] == -1) | (block[None] == block[:, None]))
    read = len(prefix) + torch.arange(count) * length + length - 2
    return Batch(
        tuple(episodes),
        tuple(map(tuple, questions)),
        ids,
        positions,
        mask[None, None],
        read,
        body[:, :, -1],
        tuple(spans),
        tuple(image_spans),
    )


def hide_from_questions(batch: Batch, frames: Sequence[int]) -> torch.Tensor:
    """The mask with these frames evicted before the questions come."""
    mask = batch.mask.clone()
    for index in frames:
        first, last = batch.spans[index]
        mask[:, :, batch.end :, first:last] = False
    return mask


def isolate(batch: Batch, frames: Sequence[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mask with these frames blind to every other chunk: what reuse without a patch serves."""
    mask = (batch.mask if mask is None else mask).clone()
    chunks = batch.spans[0][0]
    for index in frames:
        first, last = batch.spans[index]
        mask[:, :, first:last, chunks:first] = False
    return mask


def additive(mask: torch.Tensor) -> torch.Tensor:
    """A boolean mask as one to add: 0 to attend, the least float elsewhere."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pixel noise, a little blur and a little light, different for each of `[n, h, w, 3]`."""
    n = len(images)
    draw = lambda low, high: low + (high - low) * torch.rand(n, 1, 1, 1, generator=generator)  # noqa: E731
    side = draw(-0.1, 0.22).clamp_min(0)
    for axis in (1, 2):
        around = images.roll(1, axis) + images.roll(-1, axis)
        images = (1 - 2 * side) * images + side * around
    images = images * draw(0.93, 1.05) + draw(-0.02, 0.02)
    noise = torch.randn(images.shape, generator=generator)
    return (images + draw(0.0, 0.05) * noise).clamp(0, 1)


def embed(
    model: Qwen2_5_VLForConditionalGeneration,
    batch: Batch,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Input embeddings `[b, s, hidden]`: text, and pictures through the batched vision path.

    With a generator the pictures are augmented.
    """
    hidden = model.get_input_embeddings()(batch.input_ids)
    pieces, at = [], 0
    by_size: dict[tuple[int, ...], list[int]] = {}
    images = [to_unit(pixels([e.frames[i] for e in batch.episodes])) for i in range(len(batch.spans))]
    for index, image in enumerate(images):
        by_size.setdefault(tuple(image.shape[1:]), []).append(index)
    encoded: dict[int, torch.Tensor] = {}
    for indices in by_size.values():
        stacked = torch.cat([images[index] for index in indices])
        if generator is not None:
            stacked = augment(stacked, generator)
        for index, tokens in zip(indices, encode_images(model, stacked).chunk(len(indices)), strict=True):
            encoded[index] = tokens
    for index, (first, last) in enumerate(batch.image_spans):
        pieces += [hidden[:, at:first], encoded[index]]
        at = last
    return torch.cat([*pieces, hidden[:, at:]], dim=1)


@dataclass(frozen=True)
class CellLabels:
    """Truth at the picture tokens of one frame, `[b, cells]` each, -100 where there is none."""

    glyphs: torch.Tensor
    tags: torch.Tensor
    colours: torch.Tensor


def cell_labels(batch: Batch, index: int, isolated: bool = False) -> CellLabels:
    """What each token of frame `index` should know: glyph, tag, and colour or bound value.

    `isolated` takes the legends away, so values are the defaults.
    """

    def label(cells: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(cells == BLANK, -100, cells)).flatten(1)

    shown = [episode.frames[index] for episode in batch.episodes]
    glyphs = np.array([frame.glyphs for frame in shown])
    tags = np.array([frame.tags for frame in shown])
    colours = np.array([frame.colours for frame in shown])
    if batch.frames[index].kind == "items":
        for row, episode in enumerate(batch.episodes):
            value = np.array([*DEFAULTS, BLANK])
            for frame in () if isolated else episode.frames[:index]:
                for glyph, colour in frame.colour_of.items():
                    value[glyph] = colour
            colours[row] = value[glyphs[row]]
    return CellLabels(label(glyphs), label(tags), label(colours))
