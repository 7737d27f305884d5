"""Plans from traces of windows: recurring lists of antecedents, ranked by the savings of their patches."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from kamera.compile.ordering import Path, walk
from kamera.errors import TraceError


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
    for line in _behind(path, anchor):
        chunks = _held(line["chunks"], held)
        length.update(zip(line["chunks"], line["tokens"], strict=True))
        # a leading chunk has no antecedents
        arrivals.update(chunks[: i + 1] for i in range(max(1, line["placed"]), len(chunks)))
    recurred = {path: count for path, count in arrivals.items() if count >= times}
    return _chosen(recurred, length, top, tokens)


def windows_of(path: str | FilePath, anchor: str | None) -> list[tuple[str, dict[str, int], bool]]:
    """The anchor of each operation of a trace, its chunks in order with their tokens, and if any was placed.

    ``anchor`` and errors as in `mine`.
    """
    return [
        (
            line["anchor"],
            dict(zip(line["chunks"], line["tokens"], strict=True)),
            line["placed"] < len(line["chunks"]),
        )
        for line in _behind(path, anchor)
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


def _behind(path: str | FilePath, anchor: str | None) -> list[dict[str, Any]]:
    """The lines of the system prompt that is asked for."""
    lines = list(_lines(FilePath(path)))
    wanted = _anchor([line["anchor"] for line in lines], anchor)
    return [line for line in lines if line["anchor"] == wanted]


def _anchor(anchors: list[str], asked: str | None) -> str | None:
    seen = Counter(anchors)
    matching = [a for a in seen if a.startswith(asked or "")]
    if len(matching) > 1 or (asked and not matching):
        known = ", ".join(f"{a[:12]} ({count} operations)" for a, count in seen.most_common())
        raise ValueError(f"anchor {asked!r} chooses {len(matching)} system prompts of the trace: {known}")
    return matching[0] if matching else None


def _lines(path: FilePath) -> Iterator[dict[str, Any]]:
    *whole, last = path.read_bytes().split(b"\n")
    for number, data in enumerate([*whole, last], start=1):
        try:
            line = json.loads(data)
            ok = (
                isinstance(line["anchor"], str)
                and all(isinstance(chunk_id, str) for chunk_id in line["chunks"])
                and all(type(n) is int and n >= 0 for n in (line["placed"], *line["tokens"]))
                and len(line["tokens"]) == len(line["chunks"])
            )
            if not ok:
                raise ValueError("fields of the wrong form")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number > len(whole):  # the last line may be incomplete: it is still being written
                continue
            raise TraceError(
                f"{path}:{number}: not a window's operation ({type(error).__name__}: {error}): give a file "
                "that KameraWindow(trace=…) wrote"
            ) from None
        yield line
