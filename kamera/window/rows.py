"""Rows without a store: what a plan would find if windows had left their canonicals and patches behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from kamera.engines import PositionLimits
from kamera.ops import PatchBudget
from kamera.patches import Near
from kamera.store import Context, ObjectInfo
from kamera.trust import ReusePolicy
from kamera.window.plan import plan
from kamera.window.requests import Assemble, Newcomer, Placing
from kamera.window.seats import Offset, Seats, Spot
from kamera.window.steps import Cost, Limits, View

_POLICY = ReusePolicy(certified=False, on_miss="prefill", tolerance=None)
_CONTEXT = Context("", "")


class Assembled(NamedTuple):
    """An order of chunks, by their ids, and what it runs."""

    order: tuple[str, ...]
    cost: Cost


@dataclass
class NamedRows:
    """Canonicals and patches by name: ``patches`` holds the antecedents of each chunk's, in order.

    Patches are taken to have proved themselves, within any budget.
    """

    canonicals: set[str] = field(default_factory=set)
    patches: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)

    def assembled(self, tokens: dict[str, int], order: Placing) -> Assembled:
        """A new window of these chunks (their ``tokens`` by id), as `Assemble` places them.

        Each chunk's forward counts: none is joined to its neighbour's.
        """
        limits = Limits(0, PositionLimits(), None, "compact", False, _Row(tokens))
        chunks = tuple(Newcomer(name, length) for name, length in tokens.items())
        made = plan(Assemble(chunks, order=order), View(Seats.home((), 1), self, _POLICY, limits))
        return Assembled(made.after.chunk_ids, made.cost)

    def keep(self, order: Sequence[str]) -> None:
        """A window of this order leaves all its canonicals and patches."""
        self.canonicals.update(order)
        for i, name in enumerate(order[1:], 1):
            self.patches.setdefault(name, set()).add(tuple(order[:i]))

    def take(self, rows: Iterable[ObjectInfo]) -> None:
        """Add what the rows of a store name: canonicals, and patches of orders."""
        for row in rows:
            if row.kind == "canonical":
                self.canonicals.add(row.chunk_id)
            elif row.kind == "exact" and not row.base:
                self.patches.setdefault(row.chunk_id, set()).add(row.antecedents)

    # -- rows ----------------------------------------------------------------------------------

    def orders(self, chunk_id: str) -> set[tuple[str, ...]]:
        """As `Catalogue.orders`."""
        return self.patches.get(chunk_id, set())

    def has_canonical(self, chunk_id: str) -> bool:
        """As `Catalogue.has_canonical`."""
        return chunk_id in self.canonicals

    def base(self, chunk_id: str) -> ObjectInfo | None:
        """None: behind another anchor nothing is known."""
        return None

    def patch(
        self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = ""
    ) -> ObjectInfo | None:
        """The row of a patch."""
        behind = tuple(antecedents)
        if base or kind != "exact" or behind not in self.orders(chunk_id):
            return None
        budget = _POLICY.budget
        return ObjectInfo("", kind, chunk_id, _CONTEXT, behind, 0, budget.rank, "exact", 0, 0.0, budget)

    def patch_within(
        self,
        chunk_id: str,
        length: int,
        antecedents: Sequence[str],
        kind: str,
        budget: PatchBudget,
        base: str = "",
    ) -> ObjectInfo | None:
        """The row of a patch, of any budget."""
        return self.patch(chunk_id, antecedents, kind, base)

    def near(self, chunk_id: str, antecedents: Sequence[str], limit: float) -> list[Near]:
        """None are served."""
        return []

    def refused(self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = "") -> bool:
        """False: a name does not lie."""
        return False

    def unkept(self, chunk_id: str) -> bool:
        """False: what was kept is stored."""
        return False

    def returns(self, chunk_id: str, antecedents: Sequence[str]) -> bool:
        """False: later work is not counted."""
        return False


@dataclass(frozen=True)
class _Row:
    """Chunks one after another on one axis, a position for each token."""

    tokens: dict[str, int]

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]:
        ends = accumulate((self.tokens[name] for name in chunk_ids), initial=0)
        return [Spot((start,), (end - 1,)) for start, end in pairwise(ends)]

    def behind(self, chunk_ids: Sequence[str]) -> Offset:
        return (sum(self.tokens[name] for name in chunk_ids),)

    def form(self, chunk_id: str) -> None:
        return None
