"""One operation of a window at a time, across threads, on the window's account."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kamera import forks
from kamera.engines import Account, Engine

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Locked(Protocol):
    """An object whose operations must not overlap, and whose account bears their work."""

    _lock: forks.Lock
    _account: Account

    @property
    def backbone(self) -> Engine:
        """The model that works."""
        ...


Owner = TypeVar("Owner", bound=Locked)


def serial(
    operation: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """An operation that waits until those of other threads on the same window are over."""

    @functools.wraps(operation)
    def alone(self: Owner, /, *args: Given.args, **named: Given.kwargs) -> Result:
        with self._lock, self._account.now(self.backbone):
            return operation(self, *args, **named)

    return alone
