"""Run arms over a frozen benchmark."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kamera.engines.hf import Backbone
from kamera.eval import arms
from kamera.eval.adapter import ArmQuestion, Unit
from kamera.eval.arms import EXACT, Maker
from kamera.eval.desk import Desk
from kamera.eval.reuse.frozen import Benchmark
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.submission import Submission
from kamera.eval.trial import Case, Trial, trials
from kamera.window import library_versions


def arms_named(names: Sequence[str], others: Mapping[str, Maker] | None = None) -> dict[str, Maker]:
    """As `kamera.eval.arms.arms_named`, ``exact`` among them. Raises ValueError without it."""
    if EXACT not in names:
        raise ValueError(f"arms {', '.join(names) or '(none)'}: give {EXACT}, and each other at most once")
    return arms.arms_named(names, others, EXACT)


def run_benchmark(
    backbone: Backbone,
    benchmark: Benchmark,
    makers: Mapping[str, Maker],
    *,
    limit: int | None = None,
    on_item: Callable[[], None] = lambda: None,
) -> Submission:
    """Every arm answers every item behind every trace; ``exact`` first, as the others are compared with it.

    Each trace gets a new adapter. An arm's error is in its line. ``makers`` are those of `arms_named`;
    ``limit`` takes the first items only.
    """
    desk = Desk(backbone, benchmark.system)
    lines: list[Trial] = []
    for item in benchmark.items[:limit]:
        own = desk.cleared()
        for case in _cases(benchmark, item):
            lines += [_compared(trial) for trial in trials(own, case, makers, EXACT)]
        on_item()
    named = backbone.named
    system = {
        "name": "kamera",
        "model": named.checkpoint.rsplit("/", 1)[-1] or named.kind,
        "dtype": named.dtype,
        "hardware": f"{platform.machine()}, {backbone.device.type}, {torch.get_num_threads()} threads",
        "software": dict(library_versions()),
        "kv_bytes_per_token": backbone.bytes_per_token,
    }
    rehearsed = {arm: any(line.rehearsed for line in lines if line.arm == arm) for arm in makers}
    return Submission(benchmark.digest, system, rehearsed, tuple(lines))


def _cases(benchmark: Benchmark, item: Item) -> Iterator[Case]:
    live = tuple(Unit(f"live {i}", benchmark.media(content), True) for i, content in enumerate(item.live))
    query = ArmQuestion(item.question, live, item.max_new_tokens)
    for trace in item.traces:
        names = dict.fromkeys(name for window in trace.windows for name in window)
        units = {name: Unit(name, benchmark.media(item.units[name])) for name in names}
        yield Case(item.id, units, trace.windows, query, trace.name)


def _compared(trial: Trial) -> Trial:
    """What cannot be compared with ``exact`` is an error here."""
    if trial.error or trial.first_token is not None:
        return trial
    return replace(trial, error=trial.note or f"{EXACT} has no answer to compare with")
