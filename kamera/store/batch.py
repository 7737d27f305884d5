"""Concurrent look-ups, for a store that waits for a remote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WORKERS = 8
"""Most look-ups in progress at once: round trips overlap, and each holds an object's bytes."""

Given = TypeVar("Given")
Made = TypeVar("Made")


def over(items: Sequence[Given], work: Callable[[Given], Made], *, waits: bool) -> list[Made]:
    """Results of ``work`` for ``items``, in their order; computed concurrently if each call ``waits``.

    All calls are done when this returns or raises; the error of the first item that failed is raised.
    """
    if not waits or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(WORKERS, len(items)), thread_name_prefix="kamera-batch") as pool:
        begun = [pool.submit(work, item) for item in items]
    return [one.result() for one in begun]
