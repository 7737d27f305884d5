"""The segments of a prompt in the slots of a window, and the changes for a new prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kamera.content import LONGEST, Extent, Rendered, Segment, common_prefix
from kamera.edits import difference
from kamera.sessions.modes import first_that_knows_more
from kamera.trust import OnLeave
from kamera.window import GLUE, SHORTEST_KEPT, Arrange, KameraWindow, cut

Run = tuple[int, int]
"""Adjacent segments of a prompt that are one chunk, as indices [first, last + 1)."""

Piece = tuple[Run, int | None]
"""A run, and its slot or None."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A prompt, and the runs of its segments in a window's slots, in order."""

    prompt: Rendered
    runs: tuple[Run, ...]


def question(prompt: Rendered) -> int:
    """Start of the question's tokens: the generation prompt.

    Without one in the template, the last segment is the question.
    """
    return prompt.stable if prompt.stable < prompt.num_tokens else prompt.segments[-1].start


def question_ids(prompt: Rendered) -> torch.Tensor:
    """The question's tokens, int64 ``[tokens]``."""
    return prompt.ids[question(prompt) :]


def anchor_segments(prompt: Rendered) -> int:
    """Number of leading segments that are the template's own or a system message's text."""
    count = 0
    for segment in prompt.segments:
        if segment.role not in ("", "system", "developer") or segment.media is not None:
            break
        count += 1
    return count


def anchor_tokens(prompt: Rendered) -> torch.Tensor:
    """The anchor's tokens, int64 ``[tokens]``."""
    first = anchor_segments(prompt)
    return prompt.ids[: prompt.segments[first - 1].stop if first else 0]


def anchor_ids(prompt: Rendered) -> tuple[str, ...]:
    """Ids of the anchor's segments."""
    return prompt.segment_ids()[: anchor_segments(prompt)]


def last_said(prompt: Rendered) -> set[str]:
    """Ids of the segments of the last answer in the prompt."""
    said = [s for s in prompt.segments if s.role == "assistant"]
    return {s.id for s in said if s.messages == said[-1].messages}


def lay_out(
    prompt: Rendered,
    before: Layout | None,
    on_leave: OnLeave,
    *,
    apart: bool,
    again: Collection[Extent] = (),
    samples: bool = False,
) -> list[Piece]:
    """The runs of ``prompt`` between its anchor and its question, each with its slot if it has one.

    A turn's closing tag behind a new text is one run with it: one forward, and never KV from before the text.
    A text that came before (an extent of ``again``) stands without its tag, as the chunk that it was.
    New glue is one run with the new text before it, unless each segment is to stand ``apart``.

    Where a window prefills texts anyway, one forward and one slot replace several: under "exact" all adjacent
    texts after the first change form runs of at most `LONGEST` tokens without a slot, under "repair" glue, or
    what of it is too short for a window that ``samples``.
    """
    first, stop = anchor_segments(prompt), question(prompt)
    standing = {} if before is None else _standing(before, prompt)
    out: list[Piece] = []
    index = first
    while index < len(prompt.segments) and prompt.segments[index].start < stop:
        slot, last = standing.get(index, (None, index + 1))
        out.append(((index, last), slot))
        index = last
    if on_leave == "exact":
        return _join(prompt.segments, out)
    closed = _close(prompt, out, again)
    least = 0 if on_leave != "repair" else SHORTEST_KEPT if samples else GLUE
    return closed if apart else _glue(prompt.segments, closed, again=least)


def cuts(before: Layout, prompt: Rendered) -> dict[int, list[int]]:
    """Tokens before which the chunk in a slot is to be cut, so that parts of it stand in ``prompt``."""
    old = before.prompt.segments
    same = common_prefix(before.prompt.segment_ids(), prompt.segment_ids())
    if not before.runs or same >= before.runs[-1][1]:
        return {}
    there, found = _there(before, prompt), dict[int, list[int]]()
    for slot, (start, stop) in enumerate(before.runs):
        borders, index = [], start
        while index < stop:
            index += max(1, _equal(before, prompt, (index, stop), there.get(index)))
            borders.append(index)
        if len(borders) > 1 and any(i in there for i in range(start, stop)):
            found[slot] = [old[i].start - old[start].start for i in borders[:-1]]
    return found


def lent(window: KameraWindow, before: Layout, prompt: Rendered) -> Layout:
    """Leave in ``window`` what ``prompt`` begins with, as far as it knows nothing else; the layout of that.

    What leaves was behind all that stays, so nothing that stays was conditioned on it. Behind the layout's
    slots there may be one more: the head of a text that ``prompt`` goes on otherwise.
    """
    old, stop = before.prompt.segments, question(prompt)
    same = common_prefix(before.prompt.segment_ids(), prompt.segment_ids())
    same = min(same, sum([segment.start < stop for segment in prompt.segments]))
    for slot, (start, end) in enumerate(before.runs):
        at = [] if not start < same < end else [old[same].start - old[start].start]
        if at and len(cut(window, slot, at)) > 1:
            before = cut_at(before, slot, at)
    clean = first_that_knows_more(window.slots)
    count = stay = min(sum([end <= same for _, end in before.runs]), clean)
    if count < clean and old[before.runs[count][0]].media is None:
        shared = common_prefix(before.prompt.ids.tolist(), prompt.ids.tolist())
        equal, last = shared - old[before.runs[count][0]].start, window.slots[count]
        stay += equal >= last.length or (equal > 0 and len(cut(window, last, [equal])) > 1)
    window.run(window.plan(Arrange(window.slots[:stay], archive=False)))
    return Layout(before.prompt, before.runs[:count])


def cut_at(layout: Layout, slot: int, at: Sequence[int]) -> Layout:
    """The layout once the chunk in a slot was cut before these of its tokens."""
    segments, (start, stop) = layout.prompt.segments, layout.runs[slot]
    borders = [i for i in range(start, stop) if i == start or segments[i].start - segments[start].start in at]
    parts = tuple(pairwise([*borders, stop]))
    return replace(layout, runs=(*layout.runs[:slot], *parts, *layout.runs[slot + 1 :]))


def end_of(layout: Layout) -> int:
    """Tokens of the prompt up to the end of the layout's last run."""
    return layout.prompt.segments[layout.runs[-1][1] - 1].stop if layout.runs else 0


def kept_prefix(layout: Layout, prompt: Rendered) -> int:
    """Of these tokens, those with which ``prompt`` begins: whole segments, and the head of a text."""
    prompt = prompt.cut_as(layout.prompt)
    pairs = list(zip(layout.prompt.segments, prompt.segments, strict=False))
    same = next((i for i, (old, new) in enumerate(pairs) if old.id != new.id), len(pairs))
    tokens = prompt.segments[same - 1].stop if same else 0
    if same < len(pairs) and all(segment.media is None for segment in pairs[same]):
        old, new = (of.tokens(s) for of, s in zip((layout.prompt, prompt), pairs[same], strict=True))
        tokens += common_prefix(old.tolist(), new.tolist())
    return min(tokens, end_of(layout))


def known_part(prompt: Rendered, messages: int) -> Rendered:
    """``prompt`` as far as its first ``messages`` reach; the rest counts as the question."""
    last = len(prompt.segments)
    stop = next((i for i, segment in enumerate(prompt.segments) if segment.messages[1] > messages), last)
    if stop == last:
        return prompt
    return replace(prompt, segments=prompt.segments[:stop], stable=prompt.segments[stop].start)


def _there(before: Layout, prompt: Rendered) -> dict[int, int]:
    """Indices in the new prompt of the segments that it has, too."""
    change = difference(before.prompt, prompt)
    return dict((*change.kept, *change.moved))


def _equal(before: Layout, prompt: Rendered, run: Run, there: int | None) -> int:
    """Number of segments of a run, from its first on, that the new prompt has one after another at ``there``.

    By their ids: of equal tags a difference may name any.
    """
    if there is None:
        return 0
    old, new = before.prompt.segments[run[0] : run[1]], prompt.segments[there:]
    return common_prefix([s.id for s in old], [s.id for s in new[: len(old)]])


def _standing(before: Layout, prompt: Rendered) -> dict[int, tuple[int, int]]:
    """Slot and end of each run, by its first segment in the new prompt."""
    there, found = _there(before, prompt), {}
    for slot, run in enumerate(before.runs):
        at = there.get(run[0])
        if at is not None and _equal(before, prompt, run, at) == run[1] - run[0]:
            found[at] = (slot, at + run[1] - run[0])
    return found


def _close(prompt: Rendered, pieces: list[Piece], again: Collection[Extent]) -> list[Piece]:
    """Closing tags in one run with a new text before them, or without a slot behind one of ``again``."""
    opened = {start for start, _ in prompt.turns}
    tags = {(start, stop) for start, stop in prompt.tags if start not in opened}
    out: list[Piece] = []
    for (start, stop), slot in pieces:
        segment = prompt.segments[start]
        is_tag = stop == start + 1 and (segment.start, segment.stop) in tags
        if is_tag and out and out[-1][1] is None and prompt.segments[start - 1].media is None:
            text = prompt.segments[start - 1]
            came = (text.start, text.stop) in again
            out[-1:] = [out[-1], ((start, stop), None)] if came else [((out[-1][0][0], stop), None)]
        else:
            out.append(((start, stop), slot))
    return out


def _glue(
    segments: Sequence[Segment], pieces: list[Piece], *, again: int, longest_glue: int = GLUE - 1
) -> list[Piece]:
    """Glue in one run with the text before it, if both are new, or are prefilled again.

    That is glue of less than ``again`` tokens behind the first change: there is nothing to serve it from.
    Glue has at most ``longest_glue`` tokens, runs have at most `LONGEST`.
    """
    same = _count_unchanged(pieces)
    out = pieces[:same]
    open_run = False  # whether what comes next may join the last run
    for (start, stop), slot in pieces[same:]:
        text = all(s.media is None for s in segments[start:stop])
        tokens = segments[stop - 1].stop - segments[start].start
        glue = text and tokens <= longest_glue
        free = text and (slot is None or tokens < again)
        begin = out[-1][0][0] if open_run else start
        if open_run and glue and free and segments[stop - 1].stop - segments[begin].start <= LONGEST:
            out[-1] = ((begin, stop), None)
        else:
            out.append(((start, stop), slot))
        open_run = free
    return out


def _count_unchanged(pieces: list[Piece]) -> int:
    """Number of pieces in front of the first change."""
    return next((at for at, (_, slot) in enumerate(pieces) if slot != at), len(pieces))


def _join(segments: Sequence[Segment], pieces: list[Piece]) -> list[Piece]:
    """Adjacent texts behind the first change in one run, none of them in its slot."""
    same = _count_unchanged(pieces)
    parts = pieces[:same]
    for (start, stop), slot in pieces[same:]:
        shown = any(s.media is not None for s in segments[start:stop])
        parts += [((start, stop), slot)] if shown else [((i, i + 1), None) for i in range(start, stop)]
    return _glue(segments, parts, again=0, longest_glue=LONGEST)
