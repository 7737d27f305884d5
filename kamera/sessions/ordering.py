"""What a window shall hold for a prompt, under each treatment of the segments behind an edit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from kamera.content import LONGEST, Chunk, Extent, Rendered
from kamera.errors import PolicyRefused
from kamera.forks import lazy
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, Run, count_anchor_segments, question_start, runs_in_prompt
from kamera.trust import GUARANTEES, OnLeave, at_least, weakest
from kamera.window import GLUE, Arrange, KameraWindow, Plan, Slot

_TIES: tuple[OnLeave, ...] = ("repair", "keep", "exact")

Piece = tuple[Run, int | None]
"""A run, and the index of its slot or None."""


class Order(NamedTuple):
    """What a window shall hold: slots of its own, and new chunks; ids of those that came before."""

    items: list[Any]
    recurring: tuple[str, ...]
    layout: Layout


class Choice(NamedTuple):
    """A treatment, what the window shall hold under it, and the plan of that."""

    on_leave: OnLeave
    order: Order
    plan: Plan


@dataclass
class Orders:
    """The orders of a ``prompt`` in a window with these ``slots``, whose layout was ``old_layout``.

    With ``keeps_apart`` each is to stand apart, else glue is one run with a text. A text that came before (an
    extent of ``repeats``) stands as the chunk that it was. A new chunk is made once.
    """

    anchors: Anchors
    prompt: Rendered
    old_layout: Layout | None
    slots: Sequence[Slot]
    repeats: Collection[Extent] = ()
    keeps_apart: bool = False
    _chunks: dict[Run, Chunk] = field(default_factory=dict)

    def under(self, on_leave: OnLeave) -> Order:
        """What the window shall hold."""
        pieces = self._pieces(on_leave)
        new = [run for run, slot in pieces if slot is None]
        for run in new:
            if run not in self._chunks:
                self._chunks[run] = self._chunk(run)
        recurring = dict.fromkeys(self._chunks[run].id for run in new if self._extent(run) in self.repeats)
        items = [self._chunks[run] if slot is None else self.slots[slot] for run, slot in pieces]
        layout = Layout(self.prompt.without_media(), tuple([run for run, _ in pieces]))
        return Order(items, tuple(recurring), layout)

    # -- inside --------------------------------------------------------------------------------

    @lazy
    def _standing(self) -> dict[int, tuple[int, int]]:
        return {} if self.old_layout is None else runs_in_prompt(self.old_layout, self.prompt)

    def _pieces(self, on_leave: OnLeave) -> list[Piece]:
        """The runs between anchor and question.

        Where a window prefills texts anyway, one forward and one slot replace several: under "exact" all
        adjacent texts behind the first change, else a closing tag behind a new text and, unless all stands
        apart, glue.
        """
        segments, stop = self.prompt.segments, question_start(self.prompt)
        pieces, index = list[Piece](), count_anchor_segments(self.prompt)
        while index < len(segments) and segments[index].start < stop:
            slot, last = self._standing.get(index, (None, index + 1))
            if segments[last - 1].start >= stop:  # a slot that holds the question, too
                slot, last = None, index + 1
            pieces.append(((index, last), slot))
            index = last
        same = next((at for at, (_, slot) in enumerate(pieces) if slot != at), len(pieces))
        front, pieces = pieces[:same], pieces[same:]
        if on_leave == "exact":
            return [*front, *self._glue(self._split(pieces), shortest=0, longest=LONGEST)]
        pieces = self._close(pieces)
        if not self.keeps_apart:
            shortest = 0 if on_leave != "repair" else GLUE
            pieces = self._glue(pieces, shortest=shortest, longest=GLUE - 1)
        return [*front, *pieces]

    def _split(self, pieces: list[Piece]) -> list[Piece]:
        """The segments of texts apart, none of them in its slot."""
        out = list[Piece]()
        for (start, stop), slot in pieces:
            text = self._is_text((start, stop))
            out += [((i, i + 1), None) for i in range(start, stop)] if text else [((start, stop), slot)]
        return out

    def _close(self, pieces: list[Piece]) -> list[Piece]:
        """Closing tags in one run with a new text before them: one forward, never KV from before the text.

        Behind a text that came before they have no slot either.
        """
        turn_starts = {start for start, _ in self.prompt.turns}
        tags = {(start, stop) for start, stop in self.prompt.tags if start not in turn_starts}
        out = list[Piece]()
        for (start, stop), slot in pieces:
            is_tag = stop == start + 1 and self._extent((start, stop)) in tags
            if is_tag and out and out[-1][1] is None and self._is_text((start - 1, start)):
                is_recurring = self._extent((start - 1, start)) in self.repeats
                begin = start if is_recurring else out.pop()[0][0]
                slot, start = None, begin
            out.append(((start, stop), slot))
        return out

    def _glue(self, pieces: list[Piece], *, shortest: int, longest: int) -> list[Piece]:
        """Texts of at most ``longest`` tokens in one run with the text before, if both are prefilled anyway.

        A text in a slot is, if it has less than ``shortest`` tokens: nothing can serve it. Runs have
        at most `LONGEST` tokens.
        """
        out = list[Piece]()
        is_open = False  # whether what comes next may join the last run
        for run, slot in pieces:
            tokens, text = self._tokens(run), self._is_text(run)
            free = text and (slot is None or tokens < shortest)
            whole = (out[-1][0][0], run[1]) if is_open else run
            if is_open and free and tokens <= longest and self._tokens(whole) <= LONGEST:
                out[-1] = (whole, None)
            else:
                out.append((run, slot))
            is_open = free
        return out

    def _is_text(self, run: Run) -> bool:
        return all(s.media is None for s in self.prompt.segments[slice(*run)])

    def _tokens(self, run: Run) -> int:
        start, stop = self._extent(run)
        return stop - start

    def _extent(self, run: Run) -> Extent:
        return self.prompt.segments[run[0]].start, self.prompt.segments[run[1] - 1].stop

    def _chunk(self, run: Run) -> Chunk:
        first, (start, stop) = self.prompt.segments[run[0]], self._extent(run)
        backbone = self.anchors.backbone
        accepted = set(backbone.builder.accepted)
        tensors = {name: value for name, value in self.prompt.inputs(first).items() if name in accepted}
        picture = None if first.media is None else self.prompt.media[first.media].picture
        return backbone.chunk_from_tensors(
            self.prompt.ids[start:stop], label=first.role, picture=picture, **tensors
        )


def cheapest(
    window: KameraWindow,
    treatments: Sequence[OnLeave],
    orders: Orders,
) -> Choice:
    """The treatment with the fewest tokens to run, of those whose KV the policy's minimum admits.

    Equal costs go to the better guarantee, then to "repair", whose chunks
    are finer than those of "exact". Where chunks are appended only, no treatment applies, and one plan is
    made. Raises PolicyRefused if no treatment can be carried out.
    """
    costed_choices: list[tuple[tuple[int, int, int], Choice]] = []
    refusal: PolicyRefused | None = None
    for on_leave in sorted(treatments, key=_TIES.index):
        order = orders.under(on_leave)
        try:
            request = Arrange(order.items, on_leave, archive=False, recurring=order.recurring)
            plan = window.plan(request)
        except PolicyRefused as error:
            refusal = error
            continue
        if len(treatments) == 1 or order.items[: len(orders.slots)] == [*orders.slots]:
            return Choice(on_leave, order, plan)
        worth = weakest(plan.after.guarantees)
        if on_leave == "exact" or at_least(worth, window.policy.minimum):
            cost = (plan.cost.tokens, GUARANTEES.index(worth), _TIES.index(on_leave))
            costed_choices.append((cost, Choice(on_leave, order, plan)))
    if not costed_choices:
        assert refusal is not None, "exact KV is always admitted"
        raise refusal
    return min(costed_choices, key=itemgetter(0))[1]
