"""Plans from traces of windows: recurring lists of antecedents, ranked by the savings of their patches."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from kamera.compile.plan import ChunkIds, leaves, prefixes
from kamera.window import Event, read_trace


@dataclass(frozen=True)
class Recurrence:
    """A window worth compiling: its chunk ids in order, and the number of its recurrences.

    ``saved_tokens`` are the tokens that the window's patches would save if the trace occurred again,
    ``forming_tokens`` those that forming them prefills once (with stored canonicals). Patches shared with
    an earlier window of the list count there.
    """

    chunks: ChunkIds
    times: int
    saved_tokens: int
    forming_tokens: int


def recurring_windows(
    path: str | Path,
    *,
    anchor: str | None = None,
    times: int = 2,
    top: int | None = None,
    tokens: int | None = None,
    stored: Collection[str] | None = None,
    place: bool = False,
) -> list[Recurrence]:
    """The recurring windows of a trace (`kamera.window.Trace`), the largest savings first.

    An arrival of a chunk behind given antecedents counts if it occurred at least ``times`` times. Returns at
    most ``top`` windows with at most ``tokens`` to prefill in all. Windows end before the first chunk that
    is not in ``stored``. ``anchor`` selects a system prompt by a prefix of its digest, if there are several.
    With ``place`` the order of each window is free, as for `KameraWindow.assemble`, and chosen over the whole
    trace (`placed_windows`): windows of the same chunks are one, in whatever order they came.

    Raises TraceError naming the line for a file that is not a trace, ValueError for an unknown anchor, or if
    there are several and none is selected.
    """
    for name, value in (("times", times), ("top", top), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    length: dict[str, int] = {}
    arrivals: Counter[ChunkIds] = Counter()
    if place:
        _, placed, length = placed_windows(path, anchor=anchor, stored=stored)
        arrivals.update(prefix for window in placed for prefix in prefixes(window)[1:])
    for event in () if place else read_operations(path, anchor):
        slots = event.report.slots
        ids = [slot.chunk_id for slot in slots]
        chunks = tuple(ids if stored is None else takewhile(stored.__contains__, ids))
        length.update((slot.chunk_id, slot.length) for slot in slots)
        # a leading chunk has no antecedents
        arrivals.update(chunks[: i + 1] for i in range(max(1, event.first_placement), len(chunks)))
    recurrent = {path: count for path, count in arrivals.items() if count >= times}
    return _choose(recurrent, length, top, tokens)


def forming_tokens(windows: Iterable[ChunkIds], length: Mapping[str, int]) -> int:
    """Tokens that forming the patches of these windows prefills, each patch once; ``length`` by chunk id.

    A leading chunk needs none.
    """
    nodes = {path for window in windows for path in prefixes(window)[1:]}
    return sum(length[path[-1]] for path in nodes)


def placed_windows(
    path: str | Path, *, anchor: str | None = None, stored: Collection[str] | None = None
) -> tuple[list[ChunkIds], list[ChunkIds], dict[str, int]]:
    """The windows of a trace as given, each in the order in which all share most, and tokens by chunk id.

    It is the placement of the paper's appendix E. A window is what was in view before something left, or at
    the end. A patch serves a chunk behind the same chunks in the same order, so windows share those of a
    common beginning: where several begin alike, next comes the chunk by which they share most tokens. If that
    takes no fewer `forming_tokens` than the orders given, these stay. Chunks that are not ``stored`` are left
    out. Errors as `recurring_windows`.
    """
    length: dict[str, int] = {}
    last: dict[str, ChunkIds] = {}  # by window
    given: list[ChunkIds] = []
    for event in read_operations(path, anchor):
        length.update((slot.chunk_id, slot.length) for slot in event.report.slots)
        held = tuple(s.chunk_id for s in event.report.slots if stored is None or s.chunk_id in stored)
        before = last.get(event.window, ())
        if not set(before) <= set(held):
            given.append(before)
        last[event.window] = held
    given += [window for window in last.values() if window]
    orders: dict[frozenset[str], ChunkIds] = {}
    _place([(frozenset(window), frozenset(window)) for window in given], (), length, orders)
    placed = [orders[frozenset(window)] for window in given]
    is_better = forming_tokens(placed, length) < forming_tokens(given, length)
    return given, placed if is_better else given, length


def _place(
    group: Sequence[tuple[frozenset[str], frozenset[str]]],
    before: ChunkIds,
    length: Mapping[str, int],
    orders: dict[frozenset[str], ChunkIds],
) -> None:
    """Orders of windows that begin with ``before``, each given whole and as what still has to be placed."""
    group = list(dict.fromkeys(group))
    while group:
        orders.update((whole, before) for whole, rest in group if not rest)
        group = [(whole, rest) for whole, rest in group if rest]
        counts = Counter(chunk for _, rest in group for chunk in rest)
        if not counts:
            return
        best = max(counts, key=lambda chunk: ((counts[chunk] - 1) * length[chunk], counts[chunk], chunk))
        inside = [(whole, rest - {best}) for whole, rest in group if best in rest]
        _place(inside, (*before, best), length, orders)
        group = [(whole, rest) for whole, rest in group if best not in rest]


def plan_text(mined: Iterable[Recurrence], system: str | None) -> str:
    """The plan (`kamera.compile.plan`) of mined windows, JSON lines. ``system`` is the windows' prompt."""
    head = {} if system is None else {"system": system}
    lines = [{**head, "chunks": [{"chunk_id": chunk_id} for chunk_id in m.chunks]} for m in mined]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _choose(
    recurrent: dict[ChunkIds, int], length: dict[str, int], top: int | None, tokens: int | None
) -> list[Recurrence]:
    """Greedy by remaining savings: a patch of one chosen window counts in no other."""
    patch_paths: set[ChunkIds] = set()

    def worth(path: ChunkIds) -> Recurrence:
        new = [path[:n] for n in range(2, len(path) + 1) if path[:n] not in patch_paths]
        savings = sum(recurrent.get(p, 0) * length[p[-1]] for p in new)
        return Recurrence(path, recurrent[path], savings, sum(length[p[-1]] for p in new))

    out: list[Recurrence] = []
    budget = float("inf") if tokens is None else tokens
    heap = [(-worth(path).saved_tokens, path) for path in leaves(recurrent)]
    heapq.heapify(heap)
    while heap and len(out) != top:
        estimate, path = heapq.heappop(heap)
        best = worth(path)
        if -best.saved_tokens != estimate:  # smaller than on insertion: maybe not the largest any more
            heapq.heappush(heap, (-best.saved_tokens, path))
        elif best.forming_tokens <= budget:
            out.append(best)
            budget -= best.forming_tokens
            patch_paths.update(path[:n] for n in range(2, len(path) + 1))
    return out


def read_operations(path: str | Path, anchor: str | None) -> list[Event]:
    """The operations of a trace under one system prompt. ``anchor`` and errors as in `recurring_windows`."""
    events = list(read_trace(path))
    counts = Counter(event.anchor for event in events)
    anchors = [a for a in counts if a.startswith(anchor or "")]
    if len(anchors) > 1 or (anchor and not anchors):
        choices = ", ".join(f"{a[:12]} ({count} operations)" for a, count in counts.most_common())
        raise ValueError(f"anchor {anchor!r} chooses {len(anchors)} system prompts of the trace: {choices}")
    return [event for event in events if event.anchor in anchors]
