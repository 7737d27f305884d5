"""Plans from traces of windows: recurring lists of antecedents, ranked by the savings of their patches."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath

from kamera.compile.ordering import Path, walk
from kamera.window import Event, read_trace


@dataclass(frozen=True)
class Mined:
    """A window worth compiling: its chunk ids in order, and the number of its recurrences.

    ``saved_tokens`` are the tokens that the window's patches would save if the trace occurred again,
    ``forming_tokens`` those that forming them prefills once (with stored canonicals). Patches shared with
    an earlier window of the list count there.
    """

    chunks: Path
    times: int
    saved_tokens: int
    forming_tokens: int


def mine(
    path: str | FilePath,
    *,
    anchor: str | None = None,
    times: int = 2,
    top: int | None = None,
    tokens: int | None = None,
    held: Collection[str] | None = None,
) -> list[Mined]:
    """The recurring windows of a trace (`kamera.window.trace`), the largest savings first.

    An arrival of a chunk behind given antecedents counts if it occurred at least ``times`` times. Returns at
    most ``top`` windows with at most ``tokens`` to prefill in all. Windows end before the first chunk that
    is not in ``held``. ``anchor`` selects a system prompt by a prefix of its digest, if there are several.

    Raises TraceError naming the line for a file that is not a trace, ValueError for an unknown anchor, or if
    there are several and none is selected.
    """
    for name, value in (("times", times), ("top", top), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    length: dict[str, int] = {}
    arrivals: Counter[Path] = Counter()
    for event in _behind(path, anchor):
        chunks = _held([slot.chunk_id for slot in event.report.slots], held)
        length.update(_lengths(event))
        # a leading chunk has no antecedents
        arrivals.update(chunks[: i + 1] for i in range(max(1, event.placed), len(chunks)))
    recurred = {path: count for path, count in arrivals.items() if count >= times}
    return _chosen(recurred, length, top, tokens)


def windows_of(path: str | FilePath, anchor: str | None) -> list[tuple[str, dict[str, int], bool]]:
    """The anchor of each operation of a trace, its chunks in order with their tokens, and if any was placed.

    ``anchor`` and errors as in `mine`.
    """
    return [
        (event.anchor, _lengths(event), event.placed < len(event.report.slots))
        for event in _behind(path, anchor)
    ]


def plan_text(mined: Iterable[Mined], system: str | None) -> str:
    """The plan (`kamera.compile.plan`) of mined windows, JSON lines. ``system`` is the windows' prompt."""
    given = {} if system is None else {"system": system}
    lines = [{**given, "chunks": [{"chunk_id": chunk_id} for chunk_id in m.chunks]} for m in mined]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _chosen(
    recurred: dict[Path, int], length: dict[str, int], top: int | None, tokens: int | None
) -> list[Mined]:
    """Greedy by remaining savings: a patch of one chosen window counts in no other."""
    covered: set[Path] = set()

    def worth(path: Path) -> Mined:
        new = [path[:n] for n in range(2, len(path) + 1) if path[:n] not in covered]
        saved = sum(recurred.get(p, 0) * length[p[-1]] for p in new)
        return Mined(path, recurred[path], saved, sum(length[p[-1]] for p in new))

    chosen: list[Mined] = []
    left = float("inf") if tokens is None else tokens
    heap = [(-worth(path).saved_tokens, path) for path in walk(recurred).paths]
    heapq.heapify(heap)
    while heap and len(chosen) != top:
        promised, path = heapq.heappop(heap)
        best = worth(path)
        if -best.saved_tokens != promised:  # smaller than on insertion: maybe not the largest any more
            heapq.heappush(heap, (-best.saved_tokens, path))
        elif best.forming_tokens <= left:
            chosen.append(best)
            left -= best.forming_tokens
            covered.update(path[:n] for n in range(2, len(path) + 1))
    return chosen


def _held(chunks: list[str], held: Collection[str] | None) -> Path:
    if held is None:
        return tuple(chunks)
    gone = next((i for i, chunk_id in enumerate(chunks) if chunk_id not in held), len(chunks))
    return tuple(chunks[:gone])


def _behind(path: str | FilePath, anchor: str | None) -> list[Event]:
    """The operations of the system prompt that is asked for."""
    events = list(read_trace(path))
    wanted = _anchor([event.anchor for event in events], anchor)
    return [event for event in events if event.anchor == wanted]


def _lengths(event: Event) -> dict[str, int]:
    """The chunks in the window after an operation, in order, and their tokens."""
    return {slot.chunk_id: slot.length for slot in event.report.slots}


def _anchor(anchors: list[str], asked: str | None) -> str | None:
    seen = Counter(anchors)
    matching = [a for a in seen if a.startswith(asked or "")]
    if len(matching) > 1 or (asked and not matching):
        known = ", ".join(f"{a[:12]} ({count} operations)" for a, count in seen.most_common())
        raise ValueError(f"anchor {asked!r} chooses {len(matching)} system prompts of the trace: {known}")
    return matching[0] if matching else None
