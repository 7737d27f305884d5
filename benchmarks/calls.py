"""Calls of the product's functions, as the interpreter tells of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kamera

INSIDE = Path(kamera.__file__).parent


@dataclass
class Called:
    """Python calls into the product on one thread: how many, and of which functions."""

    calls: int = 0
    codes: set[Any] = field(default_factory=set)

    @property
    def files(self) -> list[str]:
        """Files of the product that were entered, by their place in the package."""
        return sorted({Path(code.co_filename).relative_to(INSIDE).as_posix() for code in self.codes})


def called(work: Callable[[], object]) -> Called:
    """What ``work`` calls of the product on this thread."""
    seen, inside = Called(), str(INSIDE)

    def hear(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            seen.calls += 1
            seen.codes.add(frame.f_code)

    sys.setprofile(hear)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen
