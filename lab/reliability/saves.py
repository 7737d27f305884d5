"""Windows saved into one directory by many threads and processes while others load it; ``--size`` is rounds.

`PROCESSES` processes of `THREADS` threads each have a window of their own and save it into the same
directory ``size`` times; between two saves each thread loads what is there.

A finding: a save that fails; a load that fails, or gives a window that is none of those saved: other
chunks, or logits that are not that window's; a process that has not ended after `SECONDS`; and a directory
that cannot be loaded when all is over, or holds more files than one save leaves.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from lab.reliability.findings import Child, Findings

SIZE: int = 40
PROCESSES, THREADS = 2, 4
SECONDS = 600.0
QUESTION = "Q: where is the red box?"

Expected = dict[tuple[str, ...], torch.Tensor]
"""Logits after `QUESTION` of each window, by its chunks."""


def run(size: int, seed: int) -> dict[str, Any]:
    """Save and load ``size`` times in every thread."""
    found = Findings()
    backbone = Backbone.from_pretrained(testbed.weights_dir(), dtype="float32").engine
    store = ChunkStore.open("memory://")
    windows = [_window(backbone, store, number) for number in range(PROCESSES * THREADS)]
    expected: Expected = {_ids(window): window.next_token_logits(QUESTION) for window in windows}
    assert len(expected) == len(windows)
    with tempfile.TemporaryDirectory() as folder:
        alone, shared = Path(folder) / "alone", Path(folder) / "shared"
        windows[0].save(alone)
        windows[0].save(shared)
        children = [
            Child(lambda n=number: _process(backbone, store, windows, expected, shared, n, size), SECONDS)
            for number in range(PROCESSES)
        ]
        for child in children:
            end = child.ended()
            if end.how != "returned":
                found.add(f"a process {end.how}", end.why)
            else:
                found.learn(end.result)
        _load(backbone, store, expected, shared, "afterwards", found)
        found.add(
            "files are left over",
            str(sorted(os.listdir(shared))),
            max(0, len(os.listdir(shared)) - len(os.listdir(alone))),
        )
    return found.figures()


def _window(backbone: HfEngine, store: ChunkStore, number: int) -> KameraWindow:
    window = KameraWindow(
        backbone, store, "You watch a camera.", policy=ReusePolicy(certified=False, forms="always")
    )
    for chunk in range(3):
        window.append(f"window {number}: frame {chunk + number} shows box {number * 7 + chunk}")
    return window


def _ids(window: KameraWindow) -> tuple[str, ...]:
    return tuple(slot.chunk_id for slot in window.slots)


def _process(
    backbone: HfEngine,
    store: ChunkStore,
    windows: list[KameraWindow],
    expected: Expected,
    shared: Path,
    number: int,
    size: int,
) -> dict[str, Any]:
    found, mine = Findings(), threading.Lock()

    def work(window: KameraWindow) -> None:
        for _ in range(size):
            try:
                window.save(shared)
                kind, why = "saves", ""
            except Exception as error:
                kind, why = f"a save fails: {type(error).__name__}", str(error)
            with mine:  # one forward at a time: whether a backbone takes more is `threads`' question
                found.add(kind, why) if why else found.done.update([kind])
                _load(backbone, store, expected, shared, "a load", found)

    own = windows[number * THREADS : (number + 1) * THREADS]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, own))
    return found.told()


def _load(
    backbone: HfEngine, store: ChunkStore, expected: Expected, shared: Path, name: str, found: Findings
) -> None:
    try:
        window = KameraWindow.load(shared, backbone, store)
        ids, logits = _ids(window), window.next_token_logits(QUESTION)
    except Exception as error:
        found.add(f"{name} fails: {type(error).__name__}", str(error))
        return
    found.done["loads"] += 1
    if ids not in expected:
        found.add(f"{name} gives chunks nobody saved", str(ids))
    elif not torch.allclose(logits, expected[ids], rtol=1e-4, atol=1e-4):
        found.add(f"{name} is wrong", f"off by {(logits - expected[ids]).abs().max():.1e}")
