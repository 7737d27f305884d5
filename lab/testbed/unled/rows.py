"""Rows of text behind a window's frames: captions that list facts, short questions, full questions.

A row sees the anchor, the frames it is allowed to see and itself, never another row. A caption sees its own
frame only and stands where text behind that frame stands: what the frame's KV does not hold, it cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kamera.engines.hf.contents import model_positions
from kamera.testbed.frames import COLOURS, GLYPHS, TAGS, Fact, Frame
from kamera.testbed.world import Episode, Question, value_of

from ..batches import SUFFIX, Batch, _ids, chunk_ids
from ..families import Family
from .attention import Block, Shape

IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """`n` rows of one length for every window: `ids` `[b, n, length]`, `said` the same with `IGNORED`
    where nothing is to be predicted, `sees` the frames in view, `behind` the frame they stand behind."""

    name: str
    ids: torch.Tensor
    said: torch.Tensor
    sees: tuple[int, ...]
    behind: int


@dataclass(frozen=True)
class Packed:
    """A batch as the model takes it, `targets` `{name: [b, s]}` with `IGNORED` where nothing is predicted.

    The target at a token is the token after it. `shape` says what the batch's mask does.
    """

    batch: Batch
    shape: Shape
    targets: dict[str, torch.Tensor]


def caption(before: Sequence[Frame], frame: Frame, fact: Fact) -> str:
    """A fact of a frame as a line of a caption: `glyph alpha red`, `tag 17 alpha red`, `glyph alpha pi red`.

    The colour of an item and of what replaces a glyph is the bound one.
    """
    if frame.shows_items:
        colour = value_of(before, fact.glyph)[0]
        return f"tag {TAGS[fact.tag]} {GLYPHS[fact.glyph]} {COLOURS[colour]}"
    if frame.kind == "rename":
        colour = value_of([*before, frame], fact.glyph)[0]
        return f"glyph {GLYPHS[fact.glyph]} {GLYPHS[fact.target]} {COLOURS[colour]}"
    return f"glyph {GLYPHS[fact.glyph]} {COLOURS[fact.colour]}"


def captions(
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    index: int,
    count: int,
    rng: np.random.Generator,
) -> Rows:
    """`count` lines about frame `index` of every window; every word but the first is to be predicted."""
    lines = []
    for one in episodes:
        frame, before = one.frames[index], one.frames[:index]
        chosen = rng.permutation(len(frame.facts))[:count]
        lines.append([_ids(tokenizer, caption(before, frame, frame.facts[i])) for i in chosen])
    ids = torch.tensor(lines)
    said = ids.clone()
    said[:, :, 0] = IGNORED
    return Rows("captions", ids, said, (index,), index)


def questions(
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    kind: str,
    count: int,
    sees: tuple[int, ...],
    rng: np.random.Generator,
    *,
    name: str,
) -> Rows:
    """`count` questions of one kind; `short` ones are answered at once (`value of tag 17 red`)."""
    asked = [_ask(one, kind, count, rng) for one in episodes]
    if name == "short":
        ids = torch.tensor([[_ids(tokenizer, f"{q.text[:-1]} {q.answer}") for q in row] for row in asked])
        said = torch.full_like(ids, IGNORED)
    else:
        (end,) = _ids(tokenizer, SUFFIX)[:1]
        block = lambda q: (*_ids(tokenizer, q.text), *_ids(tokenizer, SUFFIX), *_ids(tokenizer, q.answer))  # noqa: E731
        ids = torch.tensor([[(*block(q), end) for q in row] for row in asked])
        said = torch.full_like(ids, IGNORED)
        said[:, :, -2] = ids[:, :, -2]
    said[:, :, -1] = ids[:, :, -1]
    return Rows(name, ids, said, sees, len(episodes[0].frames) - 1)


def _ask(episode: Episode, kind: str, count: int, rng: np.random.Generator) -> list[Question]:
    subjects = episode.subjects([kind])
    return [episode.ask(*subjects[i]) for i in rng.integers(len(subjects), size=count)]


def lay_out(
    family: Family,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    rows: Sequence[Rows],
    system: str,
) -> Packed:
    """Windows of one layout and their rows as one packed batch."""
    anchor = _ids(tokenizer, f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    windows, spans = [list(anchor) for _ in episodes], []
    for index in range(len(episodes[0].frames)):
        first = len(windows[0])
        for window, one in zip(windows, episodes, strict=True):
            window += chunk_ids(family, tokenizer, one.frames[index])
        spans.append((first, len(windows[0])))
    end = len(windows[0])

    body = torch.tensor(windows)
    grids = [(1, 2 * len(f.cells), 2 * len(f.cells[0])) for f in episodes[0].frames if f.cells]
    vision = {"image_grid_thw": torch.tensor(grids)} if grids else {}
    kinds = (body[0] == tokenizer.get_vocab()[family.placeholder]).int()
    window_positions = model_positions(model, family.axes, body[0], {**vision, "mm_token_type_ids": kinds})

    ids, positions, blocks, at = [body], [window_positions], [], end
    for row in rows:
        _, count, length = row.ids.shape
        ids.append(row.ids.flatten(1))
        start = int(window_positions[:, : spans[row.behind][1]].max()) + 1
        positions.append((start + torch.arange(length)).repeat(count).expand(family.axes, -1))
        seen = (slice(0, spans[0][0]), *(slice(*spans[index]) for index in row.sees))
        blocks.append(Block(at, count, length, seen))
        at += count * length
    joined, shape = torch.cat(ids, 1), Shape(end, tuple(blocks))
    told = {row.name: torch.full_like(joined, IGNORED) for row in rows}
    for row, block in zip(rows, blocks, strict=True):
        told[row.name][:, block.first - 1 : block.stop - 1] = row.said.flatten(1)
    nothing = torch.zeros(0, dtype=torch.long)
    batch = Batch(
        tuple(episodes),
        (),
        joined,
        torch.cat(positions, 1),
        visible(shape),
        nothing,
        nothing,
        nothing,
        tuple(spans),
        (),
    )
    return Packed(batch, shape, told)


def visible(shape: Shape) -> torch.Tensor:
    """What the rows of a shape see, as a mask `[1, 1, s, s]` (True = attend)."""
    total = shape.blocks[-1].stop
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[: shape.end, : shape.end] = torch.ones(shape.end, shape.end, dtype=torch.bool).tril()
    for block in shape.blocks:
        for part in block.sees:
            mask[block.first : block.stop, part] = True
        for first in range(block.first, block.stop, block.length):
            row = slice(first, first + block.length)
            mask[row, row] = torch.ones(block.length, block.length, dtype=torch.bool).tril()
    return mask[None, None]
