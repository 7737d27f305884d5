"""``python -m lab.speed window``: each operation of a window, against the bytes it moves and a re-prefill.

Windows of every length and number of chunks asked for, over stored chunks of noise. Each operation is
timed in turn with plain copies of as many bytes as it must move; then again together with the question
behind it, so that work which an operation puts off shows; last, two forwards of a chunk's length, behind
the anchor and behind the full window, say what a re-prefill of the changed chunks would take (between
them its cost grows linearly).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from kamera import ChunkStore
from kamera.engines.hf import HfEngine
from lab.speed.content import words
from lab.speed.forks import FORKS, forks
from lab.speed.machine import copy_arm
from lab.speed.moves import Deck, Move
from lab.speed.presets import Preset, preset
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.stock import Stock
from lab.speed.table import GOALS, Result, Row, Section, goal, model_facts, preset_line, result
from lab.speed.timing import Measured, Spread, measure

NOTES = (
    "must move: canonicals read once and slots written once; for slide survivors' keys, for evict "
    "all KV on the shorter side of the gap, as the model is handed views without one",
    "times a copy: against a plain copy of as many bytes in the same rounds, for slide of survivors' "
    "keys, for fork of the whole window",
    "with the next question: operation and first question, against a question to a window that has settled; "
    "put off: what of it the operation alone does not show",
    "re-prefill: of the chunks whose place or antecedents changed, from two measured forwards (behind the "
    "anchor, behind the full window), embeddings given",
)
MEMORY = "16GiB"
SUSTAINED = 2
"""How often the whole window is replaced in the run of recalls and slides."""


def run(settings: Settings, step: Step = unwatched) -> Result:
    """Measure. Raises AssertionError where an operation ran a forward that is promised to run none."""
    chosen = preset(settings.preset)
    backbone = settings.build(chosen)
    sizes = [(tokens, chunks) for tokens in settings.lengths for chunks in settings.chunks]
    rows: list[Row] = []
    steady: list[Row] = []
    branches: list[Row] = []
    stock: Stock | None = None
    for done, (tokens, chunks) in enumerate(sizes):
        step(done, len(sizes))
        if stock is None or stock.tokens != tokens:
            stock = _stock(backbone, chosen, tokens)
        deck = Deck(stock, chunks)
        rows += operations(deck, settings)
        steady.append(sustained(deck))
        if chunks == max(settings.chunks):
            branches += [{"tokens": tokens, "chunks": chunks, **row} for row in forks(deck)]
        assert deck.forwards == 0, f"{deck.forwards} forwards in moves that are promised to run none"
    step(len(sizes), len(sizes))
    sections = [
        Section("Window operations", tuple(rows)),
        Section("Recall and slide, over and over", tuple(steady)),
        Section(f"{FORKS} forks", tuple(branches)),
        Section(GOALS, tuple(goals(rows, branches))),
    ]
    return result("window", settings, model_facts(chosen, backbone), sections, NOTES)


def operations(deck: Deck, settings: Settings) -> list[Row]:
    """One row for every operation on the deck's window."""
    moves = deck.moves()
    copies = {f"copy {m.moved}": m.moved for m in moves}
    device = settings.device
    timed = measure(
        [*[deck.arm(m) for m in moves], *[copy_arm(n, b, device) for n, b in copies.items()]],
        device,
        rounds=settings.rounds,
        min_rounds=settings.min_rounds,
        seconds=settings.seconds,
    )
    asked = measure(
        [deck.question_arm(), *[deck.arm(m, question=True) for m in moves]],
        device,
        rounds=settings.min_rounds,
        min_rounds=settings.min_rounds,
    )
    alone, full = prefill_seconds(deck)
    return [row(deck, m, timed, asked, prefill_of(m.changed, deck.chunks, alone, full)) for m in moves]


def prefill_seconds(deck: Deck) -> tuple[float, float]:
    """Seconds of a forward of a chunk's length behind the anchor alone, and behind the full window."""
    span = words(deck.stock.backbone, deck.stock.tokens, seed=1)
    empty = deck.stock.window()
    deck.ready(deck.chunks)
    deck.ask()
    deck.ask(empty)
    taken = []
    for window in (empty, deck.window):
        began = perf_counter()
        window.next_token_logits(span).sum().item()
        taken.append(perf_counter() - began)
    return taken[0], taken[1]


def prefill_of(places: range, chunks: int, alone: float, full: float) -> float:
    """Seconds a re-prefill of the chunks at ``places`` takes: attention grows with what stands before."""
    return sum(alone + (full - alone) * place / chunks for place in places)


def sustained(deck: Deck) -> Row:
    """A recall and a slide, as long as it takes to replace the window `SUSTAINED` times over."""
    deck.ready(deck.chunks)
    taken = []
    for _ in range(SUSTAINED * deck.chunks):
        spare = deck.spare().id
        began = perf_counter()
        reports = deck.window.recall(spare), deck.window.slide()
        if deck.stock.backbone.model.device.type == "cuda":
            torch.cuda.synchronize(deck.stock.backbone.model.device)
        taken.append(perf_counter() - began)
        deck.forwards += sum(r.forwards for r in reports)
    return {
        "tokens": deck.stock.tokens,
        "chunks": deck.chunks,
        "steps": len(taken),
        "ms": Spread.of(taken).times(1e3),
        "mean ms": 1e3 * sum(taken) / len(taken),
        "worst ms": 1e3 * max(taken),
    }


def goals(rows: Sequence[Row], branches: Sequence[Row]) -> list[Row]:
    """The goals this benchmark has figures for, at the last and largest window."""
    last = {str(row["operation"]): row for row in rows}
    out = []
    for name, limit in (("slide", 1.2),):
        ratio = last[name]["times a copy"]
        assert isinstance(ratio, Spread)
        out.append(goal(f"{name}: times a copy of the survivors' keys", ratio, most=limit))
    share = branches[-2]["added % of the window"]
    assert isinstance(share, float)
    return [*out, goal(f"{FORKS} forks: memory they add, % of the window", share, most=5.0)]


def page(documents: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """For docs/results/speed.md: the largest window of every result, in full."""
    for document in documents:
        for section in document["sections"]:
            if section["title"] != GOALS:
                most = max(row["chunks"] for row in section["rows"])
                rows = tuple(row for row in section["rows"] if row["chunks"] == most)
                yield Section(f"{section['title']} ({preset_line(document)})", rows)


def row(deck: Deck, move: Move, timed: Measured, asked: Measured, prefill: float) -> Row:
    took = timed.spread(move.name)
    with_question = asked.spread(f"{move.name}, then a question").median
    question = asked.spread("question").median
    return {
        "tokens": deck.stock.tokens,
        "chunks": deck.chunks,
        "operation": move.name,
        "ms": took.times(1e3),
        "must move MB": 0.0 if move.idle else move.moved / 1e6,
        "times a copy": timed.ratio(move.name, f"copy {move.moved}"),
        "times as fast as a re-prefill": prefill / took.median,
        "with the next question": asked.ratio(f"{move.name}, then a question", "question"),
        "put off ms": 1e3 * (with_question - question - took.median),
        "forwards": deck.forwards,
    }


def _stock(backbone: HfEngine, chosen: Preset, tokens: int) -> Stock:
    return Stock(backbone, chosen, ChunkStore.open("memory://", memory_limit=MEMORY), tokens)
