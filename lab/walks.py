"""How far a window's operations walk through the code: calls, files, depth. ``python -m lab.walks``.

Every operation runs once on the shipped backbone, over a store in a folder, after the same operations on
another episode have warmed what is cached. Counted are frames of `kamera` alone, in the calling thread:
each call (a generator's every resumption, too), the files they are in, and how many of them stand on the
stack at once. None of it is a time: the table is the same on every machine but for a few looks at folders.

    python -m lab.walks [--format json] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import kamera
from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from lab.speed.machine import commit

LAYOUT = "LRLIL"
"""The frames of an episode: four stand in the window, the last one is the new one."""
_PACKAGE = str(Path(kamera.__file__).parent) + os.sep


@dataclass(frozen=True)
class Walk:
    """What an operation ran through; ``forwards`` as its report counts them."""

    operation: str
    calls: int
    files: int
    depth: int
    forwards: int


@dataclass
class _Counter:
    """A profiler for `sys.setprofile`."""

    calls: int = 0
    depth: int = 0
    _now: int = 0

    def __post_init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            return
        if event == "call":
            self.calls += 1
            self.files.add(name)
            self._now += 1
            self.depth = max(self.depth, self._now)
        elif event == "return":
            self._now -= 1


def walk(operation: str, work: Callable[[], Any]) -> Walk:
    """Run ``work``, which returns an operation's report, and count."""
    counter = _Counter()
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        report = work()
    finally:
        sys.setprofile(before)
    return Walk(operation, counter.calls, len(counter.files), counter.depth, report.forwards)


def walks(backbone: Backbone, folder: Path, episode: int) -> Iterator[Walk]:
    """Each operation in turn, on one window over a store in ``folder``."""
    frames = testbed.World(0).episode(episode, layout=LAYOUT).frames
    *standing, new = [backbone.chunk(frame.content) for frame in frames]
    with ChunkStore.open(folder) as store:
        window = KameraWindow(
            backbone, store, testbed.SYSTEM, policy=ReusePolicy(certified=False, forms="always")
        )
        for chunk in standing:
            window.append(chunk)
        yield walk("append, new", lambda: window.append(new))
        window.evict(0)
        yield walk("recall, patch missing", lambda: window.recall(standing[0].id))
        window.evict(4)
        yield walk("recall, patch stored", lambda: window.recall(standing[0].id))
        yield walk("reorder, patches missing", lambda: window.reorder([4, 3, 2, 1, 0]))
        window.reorder([4, 3, 2, 1, 0])
        yield walk("reorder, patches stored", lambda: window.reorder([4, 3, 2, 1, 0]))
        yield walk("slide", lambda: window.slide())


def measure() -> list[Walk]:
    """The walks of a warm process."""
    backbone = Backbone(*testbed.load())
    with tempfile.TemporaryDirectory() as folder:
        for _ in walks(backbone, Path(folder) / "warm", 1):
            pass
        return list(walks(backbone, Path(folder) / "measured", 0))


def table(found: list[Walk]) -> str:
    """For people, and for a page."""
    lines = ["| operation | calls | files | depth | forwards |", "|---|---|---|---|---|"]
    lines += [f"| {w.operation} | {w.calls:,} | {w.files} | {w.depth} | {w.forwards} |" for w in found]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m lab.walks", description=__doc__)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args()
    found = measure()
    text = table(found)
    if asked.format == "json":
        made = {"command": "python -m lab.walks", "commit": commit(Path(kamera.__file__).parents[1])}
        text = json.dumps({**made, "walks": [asdict(w) for w in found]}, indent=1)
    if asked.output is None:
        print(text)
    else:
        asked.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
