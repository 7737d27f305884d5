"""Arms without a patch: everything prefilled anew, a prefix cache, and blind reuse."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kamera.engines import Span
from kamera.eval.adapter import ArmQuestion, Reply
from kamera.eval.desk import Placing
from kamera.ops import Patch, kv_bytes


class Exact(Placing):
    """The window is prefilled when it is asked about: windows in between cost nothing.

    The first unit is served as its canonical, which is exact there.
    """

    stores_canonicals = True

    def place(self, order: Sequence[str]) -> None:
        self.order, self.shown = tuple(order), None

    def ask(self, query: ArmQuestion) -> Reply:
        started = time.perf_counter()
        super().place(self.order)
        spent = time.perf_counter() - started
        made = super().ask(query)
        return replace(made, first_token_seconds=made.first_token_seconds + spent)

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """One forward for each unit behind the first."""
        first = order[: not self.desk.units[order[0]].live] if order else ()
        places = self.desk.places(first)
        shown = [self.desk.move(n, self.desk.canonical(n), at) for n, at in zip(first, places, strict=True)]
        return self.extend(order, shown)


class Prefix(Placing):
    """The units with which both the last window and this one begin are kept."""

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """The common prefix as it stands, one forward for each unit behind it."""
        pairs = zip(self.order, order, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.order), len(order)))
        spans = self.extend(order, (self.shown or [])[:same])
        self.kept = sum(kv_bytes(span.kv) for span in spans)
        return spans


class Blind(Placing):
    """Canonicals at their places; a live unit is prefilled where it stands."""

    stores_canonicals = True

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """Rotations only, but for live units."""
        spans: list[Span] = []
        self.kept = 0
        for index, (name, positions) in enumerate(zip(order, self.desk.places(order), strict=True)):
            if self.desk.units[name].live:
                spans = self.extend(order[: index + 1], spans)
                continue
            canonical, patch = self.desk.canonical(name), self.patch_at(index)
            self.kept += kv_bytes(canonical.kv) + (patch.nbytes if patch else 0)
            spans.append(self.desk.move(name, canonical, positions, patch))
        return spans

    def patch_at(self, index: int) -> Patch | None:
        """The patch of the window's unit at ``index``: none."""
        return None
