"""The segments of a prompt in the slots of a window, and the changes for a new prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kamera.content import Rendered, common_prefix
from kamera.edits import difference
from kamera.sessions.modes import first_that_knows_more
from kamera.window import KameraWindow, cut_text, keep_first

Run = tuple[int, int]
"""Adjacent segments of a prompt that are one chunk, as indices [first, last + 1)."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A prompt, and the runs of its segments in a window's slots, in order."""

    prompt: Rendered
    runs: tuple[Run, ...]


def question_start(prompt: Rendered) -> int:
    """Start of the question's tokens: the generation prompt.

    Without one in the template, the last segment is the question.
    """
    return prompt.stable if prompt.stable < prompt.num_tokens else prompt.segments[-1].start


def question_ids(prompt: Rendered) -> torch.Tensor:
    """The question's tokens, int64 ``[tokens]``."""
    return prompt.ids[question_start(prompt) :]


def count_system_segments(prompt: Rendered) -> int:
    """Leading segments, before the question, that are the template's own or a system message's text."""
    count, stop = 0, question_start(prompt)
    for segment in prompt.segments:
        is_own = segment.role in ("", "system", "developer") and segment.media is None
        if not is_own or segment.start >= stop:
            break
        count += 1
    return count


def count_anchor_segments(prompt: Rendered) -> int:
    """Those of them that are the anchor: all, or those in front of the first text if not `anchored`."""
    count, texts = count_system_segments(prompt), {start for start, _ in prompt.texts}
    if prompt.anchored:
        return count
    return next((i for i, segment in enumerate(prompt.segments[:count]) if segment.start in texts), count)


def system_ids(prompt: Rendered) -> tuple[str, ...]:
    """Ids of the segments of the system prompt."""
    return prompt.segment_ids()[: count_system_segments(prompt)]


def anchor_tokens(prompt: Rendered) -> torch.Tensor:
    """The anchor's tokens, int64 ``[tokens]``."""
    first = count_anchor_segments(prompt)
    return prompt.ids[: prompt.segments[first - 1].stop if first else 0]


def anchor_ids(prompt: Rendered) -> tuple[str, ...]:
    """Ids of the anchor's segments."""
    return prompt.segment_ids()[: count_anchor_segments(prompt)]


def last_answer_ids(prompt: Rendered) -> set[str]:
    """Ids of the segments of the last answer in the prompt."""
    answer_segments = [s for s in prompt.segments if s.role == "assistant"]
    return {s.id for s in answer_segments if s.messages == answer_segments[-1].messages}


def cuts(old_layout: Layout, prompt: Rendered) -> dict[int, list[int]]:
    """Tokens before which the chunk in a slot is to be cut, so that parts of it stand in ``prompt``."""
    old = old_layout.prompt.segments
    same = common_prefix(old_layout.prompt.segment_ids(), prompt.segment_ids())
    if not old_layout.runs or same >= old_layout.runs[-1][1]:
        return {}
    new_indices, slot_cuts = _new_indices(old_layout, prompt), dict[int, list[int]]()
    for slot, (start, stop) in enumerate(old_layout.runs):
        borders, index = [], start
        while index < stop:
            index += max(1, _count_equal(old_layout, prompt, (index, stop), new_indices.get(index)))
            borders.append(index)
        if len(borders) > 1 and any(i in new_indices for i in range(start, stop)):
            slot_cuts[slot] = [old[i].start - old[start].start for i in borders[:-1]]
    return slot_cuts


def keep_head(window: KameraWindow, layout: Layout, prompt: Rendered) -> Layout:
    """Leave in ``window`` what ``prompt`` begins with, as far as it knows nothing else; the layout of that.

    What leaves was behind all that stays, so nothing that stays was conditioned on it. Behind the layout's
    slots there may be one more: the head of a text that ``prompt`` goes on otherwise.
    """
    old, stop = layout.prompt.segments, question_start(prompt)
    same = common_prefix(layout.prompt.segment_ids(), prompt.segment_ids())
    same = min(same, sum([segment.start < stop for segment in prompt.segments]))
    for slot, (start, end) in enumerate(layout.runs):
        at = [] if not start < same < end else [old[same].start - old[start].start]
        if at and len(cut_text(window, slot, at)) > 1:
            layout = cut_at(layout, slot, at)
    clean = first_that_knows_more(window.slots)
    count = stay = min(sum([end <= same for _, end in layout.runs]), clean)
    if count < clean and old[layout.runs[count][0]].media is None:
        shared_tokens = common_prefix(layout.prompt.ids.tolist(), prompt.ids.tolist())
        equal, last = shared_tokens - old[layout.runs[count][0]].start, window.slots[count]
        stay += equal >= last.length or (equal > 0 and len(cut_text(window, last, [equal])) > 1)
    if stay < len(window.slots):  # else what was said behind them stays, too
        keep_first(window, stay)
    return Layout(layout.prompt, layout.runs[:count])


def cut_at(layout: Layout, slot: int, at: Sequence[int]) -> Layout:
    """The layout once the chunk in a slot was cut before these of its tokens."""
    segments, (start, stop) = layout.prompt.segments, layout.runs[slot]
    borders = [i for i in range(start, stop) if i == start or segments[i].start - segments[start].start in at]
    parts = tuple(pairwise([*borders, stop]))
    return replace(layout, runs=(*layout.runs[:slot], *parts, *layout.runs[slot + 1 :]))


def end_of(layout: Layout) -> int:
    """Tokens of the prompt up to the end of the layout's last run."""
    return layout.prompt.segments[layout.runs[-1][1] - 1].stop if layout.runs else 0


def prefix_tokens(layout: Layout, prompt: Rendered) -> int:
    """Of these tokens, those with which ``prompt`` begins: whole segments, and the head of a text."""
    prompt = prompt.cut_as(layout.prompt)
    pairs = list(zip(layout.prompt.segments, prompt.segments, strict=False))
    same = next((i for i, (old, new) in enumerate(pairs) if old.id != new.id), len(pairs))
    tokens = prompt.segments[same - 1].stop if same else 0
    if same < len(pairs) and all(segment.media is None for segment in pairs[same]):
        old, new = (of.tokens(s) for of, s in zip((layout.prompt, prompt), pairs[same], strict=True))
        tokens += common_prefix(old.tolist(), new.tolist())
    return min(tokens, end_of(layout))


def prompt_of_messages(prompt: Rendered, messages: int) -> Rendered:
    """``prompt`` as far as its first ``messages`` reach; the rest counts as the question."""
    last = len(prompt.segments)
    stop = next((i for i, segment in enumerate(prompt.segments) if segment.messages[1] > messages), last)
    if stop == last:
        return prompt
    return replace(prompt, segments=prompt.segments[:stop], stable=prompt.segments[stop].start)


def _new_indices(old_layout: Layout, prompt: Rendered) -> dict[int, int]:
    """Indices in the new prompt of the segments that it has, too."""
    change = difference(old_layout.prompt, prompt)
    return dict((*change.kept, *change.moved))


def _count_equal(old_layout: Layout, prompt: Rendered, run: Run, new_index: int | None) -> int:
    """Number of segments of a run, from its first on, that the new prompt has in a row at ``new_index``.

    By their ids: of equal tags a difference may name any.
    """
    if new_index is None:
        return 0
    old, new = old_layout.prompt.segments[run[0] : run[1]], prompt.segments[new_index:]
    return common_prefix([s.id for s in old], [s.id for s in new[: len(old)]])


def runs_in_prompt(old_layout: Layout, prompt: Rendered) -> dict[int, tuple[int, int]]:
    """Slot and end of each run that stands in ``prompt`` too, by its first segment there."""
    new_indices, slots_and_ends = _new_indices(old_layout, prompt), {}
    for slot, run in enumerate(old_layout.runs):
        at = new_indices.get(run[0])
        if at is not None and _count_equal(old_layout, prompt, run, at) == run[1] - run[0]:
            slots_and_ends[at] = (slot, at + run[1] - run[0])
    return slots_and_ends
