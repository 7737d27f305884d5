"""Run arms over a frozen benchmark."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from kamera.engines.hf import Backbone
from kamera.errors import KameraError
from kamera.eval.adapter import Adapter, Answer, Maker, Question, Unit
from kamera.eval.desk import Desk
from kamera.eval.reuse.frozen import Benchmark
from kamera.eval.reuse.item import Item, Trace
from kamera.eval.reuse.plain import EXACT
from kamera.eval.reuse.submission import Line, Submission
from kamera.eval.tasks.first_token import FirstToken
from kamera.window import library_versions


def run_benchmark(
    backbone: Backbone,
    benchmark: Benchmark,
    makers: Mapping[str, Maker],
    *,
    limit: int | None = None,
    on_item: Callable[[], None] = lambda: None,
) -> Submission:
    """Every arm answers every item behind every trace; ``exact`` first, as the others are compared with it.

    Each trace gets a new adapter. A KameraError of an arm is a line with its error. ``limit`` takes the first
    items only. Raises ValueError without ``exact``.
    """
    if EXACT not in makers:
        raise ValueError(f"arms {', '.join(makers)}: {EXACT} is what the others are compared with")
    order = [EXACT, *(name for name in makers if name != EXACT)]
    desk = Desk(backbone, benchmark.system)
    lines: list[Line] = []
    rehearsed: dict[str, bool] = {}
    for item in benchmark.items[:limit]:
        own = desk.cleared()
        for trace in item.traces:
            lines += _lines(own, benchmark, item, trace, {n: makers[n] for n in order}, rehearsed)
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
    return Submission(benchmark.digest, system, rehearsed, tuple(lines))


def _lines(
    desk: Desk,
    benchmark: Benchmark,
    item: Item,
    trace: Trace,
    makers: Mapping[str, Maker],
    rehearsed: dict[str, bool],
) -> Iterator[Line]:
    first: FirstToken | None = None
    question = Question(
        item.question, tuple(benchmark.media(content) for content in item.live), item.max_new_tokens
    )
    units = {
        name: Unit(name, benchmark.media(item.units[name]))
        for name in dict.fromkeys(name for window in trace.windows for name in window)
    }
    for name, make in makers.items():
        try:
            adapter = make(desk)
            rehearsed[name] = adapter.rehearsed
            answer, seconds = _asked(adapter, units, trace, question)
        except KameraError as error:
            told = (str(error).strip().splitlines() or [""])[0]
            yield Line(item.id, trace.name, name, error=f"{type(error).__name__}: {told}")
            continue
        if name == EXACT:
            first = FirstToken.of(answer.logits)
        if first is None:
            yield Line(item.id, trace.name, name, error=f"{EXACT} has no answer to compare with")
            continue
        yield Line(
            *(item.id, trace.name, name, answer.text.strip()),
            first_token=first.again(answer.logits),
            window_tokens=answer.window_tokens,
            recomputed_tokens=answer.recomputed_tokens,
            kept_bytes=answer.kept_bytes,
            forwards=answer.forwards,
            ttft_seconds=seconds,
        )


def _asked(
    adapter: Adapter, units: Mapping[str, Unit], trace: Trace, question: Question
) -> tuple[Answer, float]:
    """The answer behind a trace, and the seconds from placing its last window to the first token."""
    for unit in units.values():
        adapter.encode(unit)
    *before, last = trace.windows
    if adapter.rehearsed:
        adapter.place(last)
    for window in before:
        adapter.place(window)
    started = time.perf_counter()
    adapter.place(last)
    placed = time.perf_counter() - started
    answer = adapter.ask(question)
    return answer, placed + answer.first_token_seconds
