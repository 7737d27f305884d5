"""Plans from what windows did: the antecedent lists that came back, by what patches for them would save."""

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
    """A window worth compiling: its chunk ids in order, and how often all of it recurred.

    ``saved_tokens`` are what the same traffic again would not prefill with the window's patches,
    ``forming_tokens`` what forming them prefills once (its canonicals are stored). Patches that a window
    before this one brings with it count there.
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
    """The windows of a trace (`kamera.window.trace`) that recurred, the most saving first.

    A chunk's coming to a place behind antecedents counts if it did so ``times`` times or more. At most
    ``top`` windows, and at most ``tokens`` to prefill for all of them. Windows end before the first
    chunk that is not in ``held``. ``anchor`` chooses a system prompt, by the beginning of its digest,
    when windows had several.

    Raises TraceError naming the line for a file that is no trace, ValueError for an anchor that is not in
    it, or for several when none is chosen.
    """
    for name, value in (("times", times), ("top", top), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    lines = list(_lines(FilePath(path)))
    wanted = _anchor([line["anchor"] for line in lines], anchor)
    length: dict[str, int] = {}
    arrivals: Counter[Path] = Counter()
    for line in lines:
        if line["anchor"] == wanted:
            chunks = _held(line["chunks"], held)
            length.update(zip(line["chunks"], line["tokens"], strict=True))
            # a leading chunk needs no patch
            arrivals.update(chunks[: i + 1] for i in range(max(1, line["placed"]), len(chunks)))
    recurred = {path: count for path, count in arrivals.items() if count >= times}
    return _chosen(recurred, length, top, tokens)


def plan_text(mined: Iterable[Mined], system: str | None) -> str:
    """The plan (`kamera.compile.plan`) of mined windows, JSON lines. ``system`` is the windows' prompt."""
    given = {} if system is None else {"system": system}
    lines = [{**given, "chunks": [{"chunk_id": chunk_id} for chunk_id in m.chunks]} for m in mined]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _chosen(
    recurred: dict[Path, int], length: dict[str, int], top: int | None, tokens: int | None
) -> list[Mined]:
    """Greedy by what is still to be saved: what a chosen window has covered, no other saves again."""
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
        if -best.saved_tokens != promised:  # less than when it was put here: not the best any more, perhaps
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
            if number > len(whole):  # the end of a file, or a line that is being written
                continue
            raise TraceError(
                f"{path}:{number}: no operation of a window ({type(error).__name__}: {error}): give a file "
                "that KameraWindow(trace=…) wrote"
            ) from None
        yield line
