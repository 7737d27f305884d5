"""Windows of several episodes with many questions each, packed into one training batch.

All episodes of a batch share a layout, so they share token counts, positions and the attention
mask. A question block `{question}<|im_end|>\\n<|im_start|>assistant\\n{answer}` sees the anchor,
the chunks and itself, and has the positions it would have as the only question: training on a
packed window equals inference on a window with one question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from benchmarks.testbed import backbone
from kamera.engines.hf.contents import model_positions
from kamera.testbed.frames import BLANK, DEFAULTS, Frame, pixels, sentence
from kamera.testbed.world import Episode, Question, legend_of, value_of

Span = tuple[int, int]
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
SUBJECT = 3
"""Which token of a question names what it is about: `value of tag 17?`."""


@lru_cache(maxsize=65536)
def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text).input_ids)


@dataclass(frozen=True)
class Batch:
    """`b` windows of `s` tokens, `q` questions each.

    `input_ids` `[b, s]`, `positions` `[axes, s]`, `mask` `[1, 1, s, s]` (True = attend), `read`
    `[q]` the tokens whose next token is the answer, `subject` `[q]` those that name what is asked
    about, `answers` `[b, q]` token ids, `spans` the
    tokens of each frame's chunk, `facts` the tokens of each frame that state facts: its cells, or
    the last word of each sentence.
    """

    episodes: tuple[Episode, ...]
    questions: tuple[tuple[Question, ...], ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    read: torch.Tensor
    subject: torch.Tensor
    answers: torch.Tensor
    spans: tuple[Span, ...]
    facts: tuple[torch.Tensor, ...]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of the first window: kinds and sizes are those of all."""
        return self.episodes[0].frames

    @property
    def end(self) -> int:
        """The first token after the last chunk."""
        return self.spans[-1][1]

    def frame(self, index: int) -> list[Frame]:
        """Frame `index` of every window."""
        return [episode.frames[index] for episode in self.episodes]


def pack(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    questions: Sequence[Sequence[Question]],
    system: str,
) -> Batch:
    """Pack episodes of one layout and their questions (as many for each) under a system prompt."""
    anchor = _ids(tokenizer, f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    windows, spans, facts = [list(anchor) for _ in episodes], [], []
    for index, frame in enumerate(episodes[0].frames):
        first = len(windows[0])
        for window, episode in zip(windows, episodes, strict=True):
            window += chunk_ids(tokenizer, episode.frames[index])
        spans.append((first, len(windows[0])))
        facts.append(first + _fact_tokens(tokenizer, frame))

    blocks = [[_block(tokenizer, question) for question in asked] for asked in questions]
    length, count = len(blocks[0][0]), len(blocks[0])
    body, end = torch.tensor(blocks), len(windows[0])
    ids = torch.cat([torch.tensor(windows), body.flatten(1)], dim=1)

    grids = [(1, 2 * len(f.cells), 2 * len(f.cells[0])) for f in episodes[0].frames if f.cells]
    vision = {"image_grid_thw": torch.tensor(grids)} if grids else {}
    single = ids[0, : end + length]
    kinds = (single == tokenizer.get_vocab()[backbone.PLACEHOLDER]).int()
    positions = model_positions(model, backbone.AXES, single, {**vision, "mm_token_type_ids": kinds})
    positions = torch.cat([positions[:, :end], positions[:, end:].repeat(1, count)], dim=1)

    block = torch.cat([torch.full((end,), -1), torch.arange(count).repeat_interleave(length)])
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mask = causal & ((block[None] == -1) | (block[None] == block[:, None]))
    return Batch(
        tuple(episodes),
        tuple(map(tuple, questions)),
        ids,
        positions,
        mask[None, None],
        end + torch.arange(count) * length + length - 2,
        end + torch.arange(count) * length + SUBJECT,
        body[:, :, -1],
        tuple(spans),
        tuple(facts),
    )


def chunk_ids(tokenizer: PreTrainedTokenizerBase, frame: Frame) -> list[int]:
    """The tokens of a frame's chunk."""
    if frame.is_text:
        lines = [token for fact in frame.facts for token in _line(tokenizer, frame.kind, fact)]
        return [*lines, *_ids(tokenizer, frame.caption)]
    (pad,) = _ids(tokenizer, backbone.PLACEHOLDER)
    cells = [pad] * (len(frame.cells) * len(frame.cells[0]))
    before, after = _ids(tokenizer, backbone.BEFORE), _ids(tokenizer, backbone.AFTER)
    return [*before, *cells, *after, *_ids(tokenizer, frame.caption)]


def _line(tokenizer: PreTrainedTokenizerBase, kind: str, fact: Any) -> tuple[int, ...]:
    return _ids(tokenizer, f"{sentence(kind, fact)}\n")


def _fact_tokens(tokenizer: PreTrainedTokenizerBase, frame: Frame) -> torch.Tensor:
    """Where a chunk states its facts, counted from its first token."""
    if not frame.is_text:
        cells = len(frame.cells) * len(frame.cells[0])
        return len(_ids(tokenizer, backbone.BEFORE)) + torch.arange(cells)
    lengths = torch.tensor([len(_line(tokenizer, frame.kind, fact)) for fact in frame.facts])
    return lengths.cumsum(0) - 2


def _block(tokenizer: PreTrainedTokenizerBase, question: Question) -> tuple[int, ...]:
    return (
        *_ids(tokenizer, question.text),
        *_ids(tokenizer, SUFFIX),
        *_ids(tokenizer, question.answer),
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


def vision_inputs(batch: Batch, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
    """What the processor would give for the batch's pictures; augmented with a generator."""
    seen = []
    for index in range(len(batch.frames)):
        if batch.frames[index].is_text:
            continue
        images = torch.from_numpy(pixels(batch.frame(index))).float() / 255
        if generator is not None:
            images = augment(images, generator)
        images = (images - torch.tensor(OPENAI_CLIP_MEAN)) / torch.tensor(OPENAI_CLIP_STD)
        seen.append(images.permute(0, 3, 1, 2))
    return backbone.pixels(seen) if seen else {}


@dataclass(frozen=True)
class Labels:
    """Truth at the fact tokens of one frame, `[b, facts]` each, -100 where there is none.

    `glyph` is what others look the fact up by, `target` what a rename makes of it, `colour` the
    colour a legend gives or the value that is bound, `source` the frame an item or a rename has
    that from.
    """

    glyph: torch.Tensor
    tag: torch.Tensor
    target: torch.Tensor
    colour: torch.Tensor
    source: torch.Tensor


def labels(batch: Batch, index: int, isolated: bool = False) -> Labels:
    """What each fact token of frame `index` should know; `isolated` frames have no antecedents."""
    rows = []
    for episode in batch.episodes:
        frame = episode.frames[index]
        before = () if isolated else episode.frames[:index]
        facts = [(f.glyph, f.tag, f.target, *_binding(frame, f, before)) for f in frame.facts]
        table = np.array([*facts, (BLANK,) * 5])
        rows.append(table if frame.is_text else table[np.array(frame.cells).reshape(-1)])
    width = min(len(row) for row in rows) - batch.frames[index].is_text
    stacked = torch.from_numpy(np.stack([row[:width] for row in rows]))
    stacked = stacked.masked_fill(stacked == BLANK, -100)
    return Labels(*stacked.unbind(-1))


def _binding(frame: Frame, fact: Any, before: Sequence[Frame]) -> tuple[int, int]:
    """The colour a fact gives or is bound to, and the frame it has that from."""
    if frame.kind == "legend":
        return int(fact.colour), BLANK
    if frame.kind == "rename":
        legend = legend_of(before, fact.target)
        if legend is None:
            return DEFAULTS[fact.target], BLANK
        return before[legend].colour_of[fact.target], legend
    colour, through, _ = value_of(before, fact.glyph)
    return colour, through[-1] if through else BLANK
