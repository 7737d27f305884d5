"""Plans from traces of windows: recurring lists of antecedents, ranked by the savings of their patches."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path as FilePath
from typing import Any

from kamera.compile.trie import Path, leaves
from kamera.errors import TraceError


@dataclass(frozen=True)
class Recurrence:
    """A window worth compiling: its chunk ids in order, and the number of its recurrences.

    ``saved_tokens`` are the tokens that the window's patches would save if the trace occurred again,
    ``forming_tokens`` those that forming them prefills once (with stored canonicals). Patches shared with
    an earlier window of the list count there.
    """

    chunks: Path
    times: int
    saved_tokens: int
    forming_tokens: int


@dataclass(frozen=True)
class Operation:
    """A line of a trace: the system prompt's digest, the window's chunks afterwards, in order, the tokens of
    each, and the first position that was placed anew.
    """

    anchor: str
    chunks: Path
    tokens: tuple[int, ...]
    placed: int

    @classmethod
    def parse(cls, line: Any) -> Operation:
        """From a line's JSON. Raises ValueError, KeyError or TypeError for another."""
        anchor, chunks, tokens, placed = (line[name] for name in ("anchor", "chunks", "tokens", "placed"))
        names = all(isinstance(name, str) for name in (anchor, *chunks))
        counts = all(type(n) is int and n >= 0 for n in (placed, *tokens))
        if not (names and counts and len(tokens) == len(chunks)):
            raise ValueError("fields of the wrong form")
        return cls(anchor, tuple(chunks), tuple(tokens), placed)


def mine(
    path: str | FilePath,
    *,
    anchor: str | None = None,
    times: int = 2,
    top: int | None = None,
    tokens: int | None = None,
    stored: Collection[str] | None = None,
) -> list[Recurrence]:
    """The recurring windows of a trace (`kamera.window.trace`), the largest savings first.

    An arrival of a chunk behind given antecedents counts if it occurred at least ``times`` times. Returns at
    most ``top`` windows with at most ``tokens`` to prefill in all. Windows end before the first chunk that
    is not in ``stored``. ``anchor`` selects a system prompt by a prefix of its digest, if there are several.

    Raises TraceError naming the line for a file that is not a trace, ValueError for an unknown anchor, or if
    there are several and none is selected.
    """
    for name, value in (("times", times), ("top", top), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    length: dict[str, int] = {}
    arrivals: Counter[Path] = Counter()
    for operation in operations(path, anchor):
        chunks = tuple(takewhile(lambda c: stored is None or c in stored, operation.chunks))
        length.update(zip(operation.chunks, operation.tokens, strict=True))
        # a leading chunk has no antecedents
        arrivals.update(chunks[: i + 1] for i in range(max(1, operation.placed), len(chunks)))
    recurrent = {path: count for path, count in arrivals.items() if count >= times}
    return _choose(recurrent, length, top, tokens)


def plan_text(mined: Iterable[Recurrence], system: str | None) -> str:
    """The plan (`kamera.compile.plan`) of mined windows, JSON lines. ``system`` is the windows' prompt."""
    given = {} if system is None else {"system": system}
    lines = [{**given, "chunks": [{"chunk_id": chunk_id} for chunk_id in m.chunks]} for m in mined]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _choose(
    recurrent: dict[Path, int], length: dict[str, int], top: int | None, tokens: int | None
) -> list[Recurrence]:
    """Greedy by remaining savings: a patch of one chosen window counts in no other."""
    covered: set[Path] = set()

    def worth(path: Path) -> Recurrence:
        new = [path[:n] for n in range(2, len(path) + 1) if path[:n] not in covered]
        saved = sum(recurrent.get(p, 0) * length[p[-1]] for p in new)
        return Recurrence(path, recurrent[path], saved, sum(length[p[-1]] for p in new))

    chosen: list[Recurrence] = []
    left = float("inf") if tokens is None else tokens
    heap = [(-worth(path).saved_tokens, path) for path in leaves(recurrent)]
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


def operations(path: str | FilePath, anchor: str | None) -> list[Operation]:
    """The operations of a trace under one system prompt. ``anchor`` and errors as in `mine`."""
    lines = list(_lines(FilePath(path)))
    seen = Counter(line.anchor for line in lines)
    matching = [a for a in seen if a.startswith(anchor or "")]
    if len(matching) > 1 or (anchor and not matching):
        known = ", ".join(f"{a[:12]} ({count} operations)" for a, count in seen.most_common())
        raise ValueError(f"anchor {anchor!r} chooses {len(matching)} system prompts of the trace: {known}")
    return [line for line in lines if line.anchor in matching]


def _lines(path: FilePath) -> Iterator[Operation]:
    *whole, last = path.read_bytes().split(b"\n")
    for number, data in enumerate([*whole, last], start=1):
        try:
            yield Operation.parse(json.loads(data))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number > len(whole):  # the last line may be incomplete: it is still being written
                continue
            raise TraceError(
                f"{path}:{number}: not a window's operation ({type(error).__name__}: {error}): give a file "
                "that KameraWindow(trace=…) wrote"
            ) from None
