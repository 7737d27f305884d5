"""The segments of a prompt in the slots of a window, how those behind an edit are treated, and what a prompt
may begin with.

A mode treats the segments behind an edit; a layout maps segments to slots; a trail remembers the windows of
other turns and conversations, as a prefix cache knows them. A prompt takes of such a window what it begins
with, in KV that is conditioned on nothing else, so it makes no difference whose window it was. One that a
client edits away, and may bring back, is kept up to a number of bytes.
"""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from kamera import forks
from kamera.content import Conversations, Message, Rendered, common_prefix, tool_schema
from kamera.edits import Directive, EditPolicy, Mode, ask_policy, difference, edit_messages
from kamera.edits import check_policy as check_edit_policy
from kamera.errors import quote
from kamera.forks import lazy
from kamera.ops import digest
from kamera.trust import Guarantee, OnLeave, ReusePolicy, at_least, weakest
from kamera.window import (
    EngineWindow,
    KameraWindow,
    Slot,
    cut_text,
    former_of,
    keep_first,
    words_before_picture,
)

SessionMode = Mode
"""The same for all edits of a conversation (docs/sessions.md)."""
Applied = Literal["amortize", "repair", "forget"]
"""A mode without the choice."""

_ON_LEAVE: dict[str, OnLeave] = {"amortize": "keep", "repair": "repair", "forget": "exact"}
_STRICTNESS: tuple[OnLeave, ...] = ("keep", "repair", "exact")


def check_mode(mode: Any) -> None:
    """Raise ValueError for an unknown mode."""
    if mode not in get_args(SessionMode):
        raise ValueError(f"mode {quote(mode)} is none of {', '.join(get_args(SessionMode))}")


@dataclass(frozen=True, eq=False)
class Manner:
    """How a session answers: options of `ChatSession`. Raises ValueError for an unknown mode."""

    tools: Sequence[Any] | None = None
    mode: SessionMode = "auto"
    edit_policy: EditPolicy | None = None
    uncached: bool = False
    reuse: bool = False
    anticipates: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_edit_policy(self.edit_policy)
        if isinstance(self.tools, str | Mapping) or callable(self.tools):
            raise ValueError(f"tools {quote(self.tools)} are none: give a list of schemas or functions")

    @lazy
    def kind(self) -> str:
        """The digest of the tools."""
        return tools_digest(self.tools)

    def render(self, conversations: Conversations, history: Sequence[Message]) -> Rendered:
        """The prompt of a history. Raises the errors of `Conversations.render`."""
        return replace(conversations.render(history, tools=self.tools), anchored=not self.reuse)

    def shape(
        self,
        conversations: Conversations,
        history: Sequence[Message],
        turn: int,
        left: Sequence[Directive] = (),
    ) -> tuple[list[Message], list[Mode]]:
        """The history without what has ``left`` it and after the edit policy; the modes that this asks for.

        Raises EditPolicyFailed, InvalidDirective, and the errors of `Conversations.render`.
        """
        shaped: Sequence[Message] = history
        if left:
            edits = [Directive(d.start, d.end, d.replacement, d.mode, d.unit) for d in left]
            shaped = edit_messages(conversations, shaped, edits, tools=self.tools)
        if self.edit_policy is None:
            return [*shaped], []
        shaped, directives = ask_policy(self.edit_policy, shaped, turn)
        if directives:
            shaped = edit_messages(conversations, shaped, directives, tools=self.tools)
        return [*shaped], [directive.mode for directive in directives]


def tools_digest(tools: Sequence[Any] | None) -> str:
    """A digest of tools as the template sees them; the same in every process."""
    schemas = None if tools is None else [tool_schema(tool) for tool in tools]
    return digest("kamera.pool.tools.v1", json.dumps(schemas, default=repr))


def default_policy(mode: SessionMode, reuse: bool = False) -> ReusePolicy:
    """The policy of a session that was given none: exact, unless its ``mode`` or ``reuse`` asks for more.

    What "amortize" keeps remembers all that has left, however much that is. Content that came before is
    served down to survivors; a patch of other antecedents, or none, only where a policy says so.
    """
    if mode == "forget" or (mode == "auto" and not reuse):
        return ReusePolicy.exact()
    departed = 1.0 if mode == "amortize" else ReusePolicy.max_departed
    return ReusePolicy(minimum="survivor" if reuse else ReusePolicy.minimum, max_departed=departed)


def mode_of(on_leave: OnLeave) -> Applied:
    """The mode by the name that sessions give it."""
    return next(mode for mode in get_args(Applied) if _ON_LEAVE[mode] == on_leave)


def laxest_treatment(mode: str, minimum: Guarantee) -> OnLeave:
    """The least strict treatment that ``mode`` may come to under a policy's ``minimum``, at any cost."""
    if minimum == "exact":
        return "exact"
    return _ON_LEAVE[mode] if mode != "auto" else "keep" if at_least("survivor", minimum) else "repair"


OF_THE_PROMPT = frozenset({"exact", "patched", "orbit"})
"""Guarantees of KV that was conditioned on nothing outside of its prompt."""


def first_that_knows_more(slots: Sequence[Slot]) -> int:
    """Index of the first slot whose KV may be conditioned on content outside of the window."""
    indices = (i for i, slot in enumerate(slots) if slot.guarantee not in OF_THE_PROMPT)
    return next(indices, len(slots))


def worth_to_others(window: KameraWindow | EngineWindow) -> Guarantee:
    """The weakest guarantee of a window as other conversations see it."""
    return weakest({slot.guarantee for slot in window.slots})


def choices(modes: Sequence[str], minimum: Guarantee, keeps_apart: bool = False) -> tuple[OnLeave, ...]:
    """The treatments from which an edit under ``modes`` and a policy's ``minimum`` chooses.

    The strictest of several holds for all, since segments behind one edit are also behind the earlier ones.
    ``keeps_apart``: auto does not choose "exact", which prefills segments joined, so that none of them
    is found again elsewhere.
    """
    if minimum == "exact":
        return ("exact",)
    least = max((_STRICTNESS.index(_ON_LEAVE[mode]) for mode in modes if mode != "auto"), default=0)
    most = _STRICTNESS.index("repair" if keeps_apart else "exact") if "auto" in modes else least
    return _STRICTNESS[least : max(least, most) + 1]


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
    slots there may be one more: a text that ``prompt`` goes on otherwise, or a picture in place of its own.
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
        stay += shared_tokens > old[layout.runs[count][0]].start
    elif count < clean:
        stay += _words_of_picture(window, layout, prompt, count) > 0
    if stay < len(window.slots):  # else what was said behind them stays, too
        keep_first(window, stay)
    return Layout(layout.prompt, layout.runs[:count])


def _words_of_picture(window: KameraWindow, layout: Layout, prompt: Rendered, slot: int) -> int:
    """Tokens of a wrapper in front of the picture in a slot, which another one in its place has, too."""
    old, index = layout.prompt.segments, layout.runs[slot][0]
    if index >= len(prompt.segments) or old[index].media is None or prompt.segments[index].media is None:
        return 0
    vision_tokens = former_of(window).backbone.builder.vision_tokens
    words = words_before_picture(prompt.tokens(prompt.segments[index]), vision_tokens)
    return common_prefix(words.tolist(), layout.prompt.tokens(old[index]).tolist())


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
    end = prompt.segments[stop].start
    texts = tuple([(start, min(text_end, end)) for start, text_end in prompt.texts if start < end])
    return replace(prompt, segments=prompt.segments[:stop], stable=end, texts=texts)


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


SessionWindow = KameraWindow | EngineWindow
"""A session's window: of its own, or over an engine."""

KEPT = 256 << 20
"""Bytes of windows that were edited away, of one tenant."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """A ``window``, and the ``layout`` of its prompt; None without one.

    Behind the window's chunks its live KV has ``spoken``: the prompt's last tokens and an answer's,
    int64 ``[tokens]``; None if it does not.
    """

    layout: Layout | None = None
    window: SessionWindow | None = None
    spoken: torch.Tensor | None = None

    def shares(self, prompt: Rendered) -> int:
        """Tokens that ``prompt`` begins with, in KV that knows nothing else; 0 of another system prompt."""
        layout, window = self.layout, self.window
        if layout is None or window is None or anchor_ids(layout.prompt) != anchor_ids(prompt):
            return 0
        clean = first_that_knows_more(window.slots)
        is_clean = clean == len(layout.runs)
        end = end_of(layout if is_clean else Layout(layout.prompt, layout.runs[:clean]))
        tokens = min(prefix_tokens(layout, prompt), end)
        runs = [layout.prompt.segments[start].start for start, _ in layout.runs[:clean]]
        if tokens in runs and isinstance(window, KameraWindow):
            tokens += _words_of_picture(window, layout, prompt.cut_as(layout.prompt), runs.index(tokens))
        if tokens == end and is_clean and self.spoken is not None:
            starts = (s.start for s in prompt.segments if s.media is not None and s.start >= end)
            coming = prompt.ids[end : next(starts, prompt.num_tokens)]
            tokens += common_prefix(self.spoken.tolist(), coming.tolist())
        return tokens

    def prefix_misses(self, prompt: Rendered) -> int:
        """Tokens of ``prompt`` that a prefix cache would run which has this prompt and its answer."""
        if self.layout is None:
            return prompt.num_tokens
        old = self.layout.prompt
        held = old.ids if self.spoken is None else torch.cat([old.ids[: question_start(old)], self.spoken])
        same = min(len(held), prompt.num_tokens - 1)  # the last one is run for its logits
        same = int((held[:same] == prompt.ids[:same]).long().cumprod(0).sum())
        media = {s.start: s.id for s in old.segments if s.media is not None}
        for segment in prompt.segments:  # pictures have equal tokens
            if segment.media is not None and media.get(segment.start) != segment.id:
                same = min(same, segment.start)
        return prompt.num_tokens - same


class Trail:
    """The stretches of one tenant's sessions, and up to ``limit`` bytes of those edited away. Thread-safe."""

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._lock = forks.Lock()
        self._known: weakref.WeakSet[Stretch] = weakref.WeakSet()
        self._left: OrderedDict[Stretch, int] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of those that were edited away."""
        with self._lock:
            return sum(self._left.values())

    def add(self, stretch: Stretch) -> None:
        """Know a stretch as long as somebody has it."""
        if stretch.window is not None:
            with self._lock:
                self._known.add(stretch)

    def keep(self, stretch: Stretch, nbytes: int) -> None:
        """Keep a stretch of ``nbytes`` that nobody has any more; the oldest make room for it."""
        with self._lock:
            self._left[stretch] = nbytes
            while sum(self._left.values()) > self._limit:
                self._left.popitem(last=False)

    def best(self, prompt: Rendered, but: Stretch) -> tuple[Stretch | None, int]:
        """The stretch that has the most of a prompt's beginning, ``but`` that one, and how many tokens."""
        with self._lock:
            stretches = [s for s in (*self._known, *self._left) if s.window is not but.window]
        best, most = None, 0
        for stretch in stretches:
            if (tokens := stretch.shares(prompt)) > most:
                best, most = stretch, tokens
        with self._lock:
            if best is not None and best in self._left:
                self._left.move_to_end(best)
        return best, most
