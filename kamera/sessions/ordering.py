"""What a window shall hold for a prompt, under each treatment of the segments behind an edit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from kamera.content import Chunk, Extent, ProcessedMedia, Rendered
from kamera.errors import PolicyRefused
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, Run, lay_out
from kamera.trust import GUARANTEES, OnLeave, ReusePolicy, at_least, weakest
from kamera.window import Arrange, KameraWindow, Plan, terms_in_force

_TIES: tuple[OnLeave, ...] = ("repair", "keep", "exact")


class Order(NamedTuple):
    """What a window shall hold: slots by their indices, and new chunks; ids of those that came before."""

    items: Sequence[int | Chunk]
    recurring: tuple[str, ...]
    layout: Layout


class Choice(NamedTuple):
    """A treatment, what the window shall hold under it, and the plan of that."""

    on_leave: OnLeave
    order: Order
    plan: Plan


@dataclass
class Orders:
    """The orders of a ``prompt`` in a window whose layout was ``before``.

    ``media`` are its pictures and clips, by digest, ``again`` the extents that came before
    elsewhere; ``apart`` and ``samples`` as in `lay_out`. A new chunk is made once.
    """

    anchors: Anchors
    prompt: Rendered
    before: Layout | None
    media: Mapping[str, ProcessedMedia]
    again: Collection[Extent] = ()
    apart: bool = False
    samples: bool = False
    _made: dict[Run, Chunk] = field(default_factory=dict)

    def under(self, on_leave: OnLeave) -> Order:
        """What the window shall hold."""
        pieces = lay_out(
            self.prompt, self.before, on_leave, apart=self.apart, again=self.again, samples=self.samples
        )
        new = [run for run, slot in pieces if slot is None]
        for run in new:
            if run not in self._made:
                self._made[run] = self._chunk(run)
        recurring = dict.fromkeys(self._made[run].id for run in new if self._extent(run) in self.again)
        items = [self._made[run] if slot is None else slot for run, slot in pieces]
        return Order(items, tuple(recurring), Layout(self.prompt, tuple([run for run, _ in pieces])))

    # -- inside --------------------------------------------------------------------------------

    def _extent(self, run: Run) -> Extent:
        return self.prompt.segments[run[0]].start, self.prompt.segments[run[1] - 1].stop

    def _chunk(self, run: Run) -> Chunk:
        first, (start, stop) = self.prompt.segments[run[0]], self._extent(run)
        backbone = self.anchors.backbone
        shown = None if first.media is None else self.media[first.media]
        inputs, accepted = {} if shown is None else shown.inputs, set(backbone.builder.accepted)
        given = {name: value for name, value in inputs.items() if name in accepted}
        picture = None if shown is None else shown.picture
        return backbone.chunk_from_tensors(
            self.prompt.ids[start:stop], label=first.role, picture=picture, **given
        )


def cheapest(
    window: KameraWindow,
    among: Sequence[OnLeave],
    orders: Orders,
    policy: ReusePolicy,
) -> Choice:
    """The treatment with the fewest tokens to run, of those whose KV the policy's minimum admits.

    ``policy`` is that of the plans. Equal costs go to the better guarantee, then to "repair", whose chunks
    are finer than those of "exact". Where chunks are appended only, no treatment applies, and one plan is
    made. Raises PolicyRefused if no treatment can be carried out.
    """
    slots = window.slots
    found: list[tuple[tuple[int, int, int], Choice]] = []
    refusal: PolicyRefused | None = None
    for on_leave in sorted(among, key=_TIES.index):
        order = orders.under(on_leave)
        try:
            items = [slots[item] if isinstance(item, int) else item for item in order.items]
            request = Arrange(items, on_leave, archive=False, recurring=order.recurring)
            plan = window.plan(request, policy=policy)
        except PolicyRefused as error:
            refusal = error
            continue
        if len(among) == 1 or list(order.items[: len(slots)]) == list(range(len(slots))):
            return Choice(on_leave, order, plan)
        worth = weakest(plan.after.worths)
        if on_leave == "exact" or at_least(worth, terms_in_force(window).served.minimum):
            cost = (plan.cost.tokens, GUARANTEES.index(worth), _TIES.index(on_leave))
            found.append((cost, Choice(on_leave, order, plan)))
    if not found:
        assert refusal is not None, "exact KV is always admitted"
        raise refusal
    return min(found, key=itemgetter(0))[1]
