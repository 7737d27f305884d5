"""Many look-ups at once, where each of them waits for a remote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WORKERS = 8
"""How many are under way at once: round trips overlap, and each holds an object's bytes."""

Given = TypeVar("Given")
Made = TypeVar("Made")


def over(items: Sequence[Given], work: Callable[[Given], Made], *, waits: bool) -> list[Made]:
    """``work`` of each of ``items``, in their order; side by side if each ``waits`` for somebody.

    All are done when this returns or raises; of several errors the first item's is raised.
    """
    if not waits or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(WORKERS, len(items)), thread_name_prefix="kamera-batch") as pool:
        begun = [pool.submit(work, item) for item in items]
    return [one.result() for one in begun]
