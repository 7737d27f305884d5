"""Arms measured side by side: they take turns, so that whatever else the machine does meets all of them.

A ratio between two arms is taken round by round and its median reported: a slow minute slows both sides
of a ratio, not one. Wall times are medians with the middle half of the rounds around them.

An edit takes milliseconds where the prefill beside it takes seconds. So that few rounds do not mean few
edits, a quick arm runs several times in a round and its median stands for the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """A median, and between which values the middle half lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value; quartiles are interpolated."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def times(self, factor: float) -> Spread:
        """Every value times ``factor`` (above zero): another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Arm:
    """One way to do the work.

    ``run`` is timed; ``before`` is not: it is called ahead of every run and its result, if there is a
    ``before``, handed to ``run``. Whatever ``run`` returns is dropped outside the clock.
    """

    name: str
    run: Callable[..., object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Measured:
    """Seconds of every arm, round by round (the i-th entries of all arms are of one round).

    ``seconds`` is wall time, the device waited for before and after; ``device_seconds`` is what events
    on a GPU's stream say of the same runs, empty on a CPU. The difference is launch overhead that
    the device does not see.
    """

    seconds: Mapping[str, tuple[float, ...]]
    device_seconds: Mapping[str, tuple[float, ...]]

    @property
    def rounds(self) -> int:
        """How many rounds were timed."""
        return len(next(iter(self.seconds.values())))

    def spread(self, arm: str) -> Spread:
        """Wall seconds of an arm."""
        return Spread.of(self.seconds[arm])

    def device_spread(self, arm: str) -> Spread | None:
        """Device seconds of an arm; None on a CPU."""
        held = self.device_seconds.get(arm)
        return None if held is None else Spread.of(held)

    def ratio(self, numerator: str, denominator: str, factor: float = 1.0) -> Spread:
        """How many times as long ``numerator`` takes as ``denominator``, round by round, times ``factor``."""
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        return Spread.of([factor * n / d for n, d in pairs])


def measure(
    arms: Sequence[Arm],
    device: torch.device | str,
    *,
    rounds: int = 20,
    min_rounds: int = 3,
    seconds: float = 20.0,
    warmup: int = 1,
) -> Measured:
    """Time every arm in turn, ``warmup`` (at least one) rounds first that do not count.

    Stops after ``rounds``, or after ``seconds`` (warm-up included) once ``min_rounds`` are done. The
    order of arms turns by one from round to round, so that none always runs behind the same other.
    """
    if len({arm.name for arm in arms}) != len(arms) or not arms:
        raise ValueError(f"arms {[arm.name for arm in arms]}: give at least one, each by a name of its own")
    clock = _Clock(torch.device(device))
    began = time.perf_counter()
    for _ in range(max(1, warmup)):
        alone = {arm.name: clock.whole(arm) for arm in arms}
    slowest = max(alone.values())
    repeats = {name: max(1, min(REPEATS, int(_QUICK * slowest / took))) for name, took in alone.items()}
    wall: dict[str, list[float]] = {arm.name: [] for arm in arms}
    inside: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for i in range(rounds):
        if i >= min_rounds and time.perf_counter() - began > seconds:
            break
        turn = i % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            timed = [clock.time(arm) for _ in range(repeats[arm.name])]
            wall[arm.name].append(median(took for took, _ in timed))
            on_device = [took for _, took in timed if took is not None]
            if on_device:
                inside[arm.name].append(median(on_device))
    return Measured(
        {name: tuple(held) for name, held in wall.items()},
        {name: tuple(held) for name, held in inside.items() if held},
    )


REPEATS = 9
"""At most so many runs of a quick arm in one round."""

_QUICK = 0.05  # all repeats of an arm together take about this share of the slowest arm's run at the most


class _Clock:
    """Times one run of an arm: wall seconds, and the device's own where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"

    def whole(self, arm: Arm) -> float:
        """Seconds a run costs with what goes ahead of it."""
        began = time.perf_counter()
        self.time(arm)
        return time.perf_counter() - began

    def time(self, arm: Arm) -> tuple[float, float | None]:
        given: tuple[Any, ...] = () if arm.before is None else (arm.before(),)
        if not self._cuda:
            began = time.perf_counter()
            made = arm.run(*given)
            took = time.perf_counter() - began
            del made
            return took, None
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            began = time.perf_counter()
            start.record()
            made = arm.run(*given)
            stop.record()
            torch.cuda.synchronize()
            took = time.perf_counter() - began
        del made
        return took, start.elapsed_time(stop) / 1e3
