"""Runs every table on every family, families side by side in processes of one thread each."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from kamera.cli.options import Dtype, Loading
from kamera.engines.hf import HfEngine, describe
from lab.paper import (
    basis,
    deficit,
    depth,
    envelope,
    frontier,
    modality,
    recall,
    refresh,
    reorder,
    survivors,
)
from lab.paper.draw import MAIN, PER_WINDOW, Bench, Make, Stage
from lab.paper.tally import Number, Row, Tally
from lab.testbed import BACKBONES, load

TABLES: dict[str, Sequence[Callable[[Stage, Tally], None]]] = {
    frontier.NAME: (deficit.measure, frontier.measure),
    reorder.NAME: (reorder.measure,),
    recall.NAME: (recall.measure,),
    survivors.NAME: (survivors.measure,),
    survivors.BOUND: (survivors.measure_bound,),
    envelope.NAME: (envelope.measure,),
    envelope.SUPERSET: (envelope.measure_superset,),
    refresh.NAME: (refresh.measure,),
    depth.NAME: (depth.measure,),
    basis.NAME: (basis.measure,),
    modality.NAME: (modality.measure,),
}
"""What is measured until every arm of the named section has answered enough multi-hop questions."""

OF_THE_WORLD = (survivors.BOUND,)
"""Tables that need to know what the frames say: only the testbed's do."""

IN_PAPER: dict[str, tuple[str, ...]] = {
    "table 1": (recall.NAME, survivors.NAME),
    **{f"table {n}": (frontier.NAME,) for n in (3, 4, 5, 6, 7, 8)},
    **{f"figure {n}": (frontier.NAME,) for n in (3, 4, 5, 7, 9)},
    "figure 6": (frontier.NAME, depth.NAME),
    "figure 8": (frontier.NAME, depth.NAME),
    "figure 10": (modality.NAME,),
}
"""The paper's tables and figures, and what is measured for them (the deficit beside the frontier)."""

MOST_FITTED = 24
"""Episodes the shared basis is fitted on, or as many as are asked where those are fewer."""


@dataclass(frozen=True)
class Progress:
    """``done`` of ``wanted`` multi-hop questions per row, in the table that is furthest behind."""

    family: str
    done: int
    wanted: int


@dataclass(frozen=True)
class Findings:
    """All that was measured on one family."""

    family: str
    model: str
    fingerprint: str
    layers: int
    channels: tuple[str, ...]
    chunk_tokens: int
    chunk_bytes: int
    episodes: int
    seconds: float
    rows: tuple[Row, ...]
    numbers: tuple[Number, ...]


def tables_of(asked: Sequence[str]) -> tuple[str, ...]:
    """Names in `TABLES` for names in `IN_PAPER`; all for none. Raises ValueError for an unknown one."""
    for one in asked:
        if one == "figure 11":
            raise ValueError("figure 11 is of memory and time: python -m lab.speed measures it")
        if one not in IN_PAPER:
            raise ValueError(f"{one} is not measured here: there are {', '.join(IN_PAPER)}")
    wanted = {name for one in asked for name in IN_PAPER[one]}
    return tuple(name for name in TABLES if name in wanted or not asked)


def measure_family(
    name: str,
    backbone: HfEngine,
    items: int,
    seed: int,
    *,
    tables: Sequence[str] = tuple(TABLES),
    make: Make | None = None,
    system: str | None = None,
    also: Callable[[Stage], None] | None = None,
) -> Iterator[Progress | Findings]:
    """These tables on one backbone; at last its findings. ``items`` multi-hop questions per row at least.

    ``make`` and ``system`` as in `Bench.prepare`; ``also`` is called with each stage after its tables.
    """
    started = time.perf_counter()
    tally = Tally()
    bench = Bench.prepare(backbone, seed, max(4, min(MOST_FITTED, items // PER_WINDOW)), make, system)
    index, done = 0, 0
    stage = bench.stage(0)
    while done < items:
        stage = bench.stage(index)
        for table in tables:
            if tally.questions(table) < items:
                for measure in TABLES[table]:
                    measure(stage, tally)
        if also is not None:
            also(stage)
        done = min(tally.questions(table) for table in tables)
        index += 1
        yield Progress(name, min(done, items), items)
    scene, what = stage.scene(MAIN), describe(backbone)
    yield Findings(
        name,
        what.model_class,
        backbone.fingerprint,
        what.kv_layers,
        what.channels,
        scene.target.num_tokens,
        scene.chunk_bytes,
        index,
        time.perf_counter() - started,
        tuple(tally.rows(by_hops=(frontier.NAME, reorder.NAME))),
        tuple(tally.numbers()),
    )


def measure_families(
    families: Sequence[str],
    *,
    items: int = 500,
    seed: int = 0,
    jobs: int = 1,
    tables: Sequence[str] = tuple(TABLES),
    dtype: str = "float32",
) -> Iterator[Progress | Findings]:
    """`measure_family` of each backbone (`family_names`), ``jobs`` at a time; findings as they come.

    Raises ValueError for an unknown family before anything runs.
    """
    names = family_names(families)
    if jobs == 1:
        for name, family in zip(names, families, strict=True):
            with one_thread():
                yield from measure_family(name, backbone_of(family, dtype), items, seed, tables=tables)
        return
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        told: Any = manager.Queue()
        jobs_of = zip(names, families, strict=True)
        working = {pool.submit(_work, *job, items, seed, tables, dtype, told) for job in jobs_of}
        while working:
            done, working = wait(working, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            yield from _drained(told)


def family_names(families: Sequence[str]) -> list[str]:
    """What each family is called: a backbone of the testbed, or the last part of a model directory.

    Raises ValueError for what is neither.
    """
    for one in families:
        if one not in BACKBONES and not Path(one).is_dir():
            raise ValueError(
                f"no testbed family {one!r} and no such directory: there are {', '.join(BACKBONES)}"
            )
    return [one if one in BACKBONES else Path(one).resolve().name for one in families]


def backbone_of(family: str, dtype: str = "float32") -> HfEngine:
    """A backbone of the testbed, or that of a model directory."""
    if family in BACKBONES:
        return HfEngine(*load(family, dtype=getattr(torch, dtype)))
    return Loading(dtype=cast(Dtype, dtype)).load(family, show_progress=False)


def _work(
    name: str, family: str, items: int, seed: int, tables: Sequence[str], dtype: str, told: Any
) -> None:
    """One family in a process of its own."""
    with one_thread():
        for step in measure_family(name, backbone_of(family, dtype), items, seed, tables=tables):
            told.put(step)


def _drained(told: Any) -> Iterator[Progress | Findings]:
    while True:
        try:
            yield told.get_nowait()
        except queue.Empty:
            return


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads change the order of sums: one, so that a seed means the same numbers everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
