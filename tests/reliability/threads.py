"""Many threads on one backbone and one store, a window each.

Each thread appends pictures and texts, slides, recalls, reorders, evicts, forks and asks, at random. Beside
them one thread calls the plain model as a user would. Then the same operations run one thread after
another on a store of its own: every stored object must be the same bit for bit, every operation must have
reported the same work, and every answer must be the same.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.ops.digest import tensor_digest
from kamera.patches import background_of
from kamera.store import StoreAdmin
from kamera.window import Report

LIMIT = 4  # chunks in a window
SWITCH = 1e-5  # seconds between switches of threads: many, so that whatever can meet does

Content = Callable[[int, int], Any]
"""What a thread appends as its n-th new chunk: (thread, n)."""
Asked = Callable[[KameraWindow], Any]
"""An answer of a window, comparable."""
Objects = dict[tuple[Any, ...], str]


def compare(
    backbone: HfEngine,
    content: Content,
    asked: Asked,
    system: Any,
    plain: torch.Tensor,
    size: int,
    seed: int,
    threads: int,
) -> dict[str, Any]:
    """What went wrong with ``threads`` at once, against one after another; zeros if nothing did.

    ``plain`` are token ids ``[tokens]`` that the bystander asks the plain model about.
    """
    policy = ReusePolicy(forms="always")

    def work(store: ChunkStore, thread: int) -> list[Any]:
        window = KameraWindow(backbone, store, system, policy=policy)
        return _operate(window, content, asked, thread, size, random.Random(f"{seed} {thread}"))

    with ChunkStore.open("memory://") as store:
        with _bystander(backbone, plain) as wrong, _switching(), ThreadPoolExecutor(threads) as pool:
            together = list(pool.map(lambda thread: work(store, thread), range(threads)))
        background_of(backbone).flush()
        got = contents(store)
    with ChunkStore.open("memory://") as store:
        alone = [work(store, thread) for thread in range(threads)]
        background_of(backbone).flush()
        want = contents(store)
    pairs = [pair for a, b in zip(together, alone, strict=True) for pair in zip(a, b, strict=True)]
    return {
        "threads": threads,
        "operations": threads * size,
        "objects": len(want),
        "exceptions": sum(isinstance(done, Exception) for thread in together for done in thread),
        "wrong objects": sum(got[key] != want[key] for key in got.keys() & want.keys()),
        "missing or extra objects": len(got.keys() ^ want.keys()),
        "wrong reports": sum(a != b for a, b in pairs if isinstance(b, tuple)),
        "wrong answers": sum(a != b for a, b in pairs if not isinstance(b, tuple)),
        "forwards of a bystander": wrong[0],
        "wrong ones of a bystander": wrong[1],
    }


def contents(store: ChunkStore) -> Objects:
    """Digests of the tensors of all that is stored, by what it is."""
    found: Objects = {}
    for info in store.ls():
        record: Any = StoreAdmin(store).read(info.key)
        what = (info.kind, info.chunk_id, info.antecedents, getattr(record, "formed", ""))
        found[what] = tensor_digest(record.tensors())
    return found


def _operate(
    window: KameraWindow, content: Content, asked: Asked, thread: int, size: int, rng: random.Random
) -> list[Any]:
    """One thread: of each operation what it reported, of each question the answer."""
    windows, known, made = [window], [], 0
    done: list[Any] = []
    for _ in range(size):
        window.flush()  # what is at hand then does not depend on who was faster
        window = rng.choice(windows)
        draw = rng.random()
        try:
            if draw < 0.35 or not len(window):
                if len(window) >= LIMIT:
                    done.append(_said(window.slide(1)))
                    continue
                report = window.append(content(thread, made))
                made += 1
                known.append(report.slots[-1].chunk_id)
                done.append(_said(report))
            elif draw < 0.5:
                done.append(_said(window.recall(rng.choice(known))))
                while len(window) > LIMIT:
                    window.flush()
                    window.slide(1)
            elif draw < 0.6:
                done.append(_said(window.slide(1)))
            elif draw < 0.7:
                done.append(_said(window.evict(rng.randrange(len(window)))))
            elif draw < 0.8:
                done.append(_said(window.reorder(rng.sample(range(len(window)), len(window)))))
            elif draw < 0.85:
                windows = [window, window.fork()]
                done.append(None)
            else:
                done.append(asked(window))
        except Exception as error:  # whatever it is, it is counted
            done.append(error)
    return done


def _said(report: Report) -> tuple[Any, ...]:
    """What a report counts, and what the slots are worth."""
    return (
        report.operation,
        report.forwards,
        report.tokens_recomputed,
        report.vision_encodes,
        report.bytes_patched,
        [(slot.chunk_id, slot.guarantee, slot.antecedents) for slot in report.slots],
        report.notes,
    )


@contextmanager
def _bystander(backbone: HfEngine, ids: torch.Tensor) -> Iterator[list[int]]:
    """While open, a thread calls the plain model: how often, and how often it was wrong or stopped."""
    counts, over = [0, 0], threading.Event()

    def ask() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = backbone.model(input_ids=ids[None], use_cache=False).logits
        return logits

    want = ask()

    def look() -> None:
        while not over.wait(0.002):
            counts[0] += 1
            try:
                counts[1] += not torch.equal(ask(), want)
            except Exception:
                counts[1] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


@contextmanager
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
