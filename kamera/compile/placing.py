"""The windows of a trace as their chunks arrived, and as `KameraWindow.assemble` places them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path as FilePath

from kamera.compile.mine import windows_of
from kamera.compile.ordering import Path
from kamera.store import ObjectInfo
from kamera.window import NamedRows


@dataclass(frozen=True)
class Placed:
    """A window of a trace: its chunks as they arrived and as they are placed, and what each order runs."""

    arrived: Path
    placed: Path
    arrived_forwards: int
    arrived_tokens: int
    placed_forwards: int
    placed_tokens: int


def place(
    path: str | FilePath, *, anchor: str | None = None, rows: Sequence[ObjectInfo] = ()
) -> list[Placed]:
    """The windows of a trace, each put together out of what is stored by then, in both orders.

    A window is what an operation left that placed chunks anew, unless the next line's window begins with it.
    Each leaves the canonicals and patches of its order, arrived and placed ones each for their own kind; both
    begin with what ``rows`` of a store hold behind the same anchor. Chunks run one forward each. ``anchor``
    and errors as in `mine`.
    """
    windows = windows_of(path, anchor)
    arrivals, placements = NamedRows(), NamedRows()
    for known in (arrivals, placements):
        known.take(row for row in rows if windows and row.context.anchor == windows[0][0])
    made = []
    for tokens in _whole(windows):
        old, new = arrivals.assembled(tokens, "given"), placements.assembled(tokens, "free")
        arrivals.keep(old.order)
        placements.keep(new.order)
        runs = (old.cost.forwards, old.cost.tokens, new.cost.forwards, new.cost.tokens)
        made.append(Placed(old.order, new.order, *runs))
    return made


def _whole(windows: Iterable[tuple[str, dict[str, int], bool]]) -> Iterator[dict[str, int]]:
    """The windows that chunks were placed into, the last of each that grew."""
    end: tuple[str, dict[str, int], bool] = ("", {}, False)
    new = False
    for (_, window, placed), (_, following, _) in pairwise([*windows, end]):
        new = new or placed
        grows = [*following][: len(window)] == [*window]
        if new and not grows:
            yield window
        new = new and grows
