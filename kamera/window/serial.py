"""One operation of a window at a time, across threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kamera import forks

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Locked(Protocol):
    """An object whose operations must not overlap."""

    _lock: forks.Lock


Owner = TypeVar("Owner", bound=Locked)


def serial(
    operation: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """An operation that waits until those of other threads on the same window are over."""

    @functools.wraps(operation)
    def alone(self: Owner, /, *args: Given.args, **named: Given.kwargs) -> Result:
        with self._lock:
            return operation(self, *args, **named)

    return alone
