"""``python -m lab.speed compile``: what it costs to form a patch, part by part, and how soon it is repaid.

A patch needs two forwards of its chunk, one behind the anchor alone and one behind its antecedents, the
difference of the two, its factors, and a place in the store. Where the chunk is prefilled in context
anyway (`append`), that second forward costs nothing more. What a reuse saves is that forward less the
recall in its place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import count

import torch

from kamera import Chunk, ChunkStore
from kamera.engines.hf import HfEngine, forwards
from kamera.ops import KV, deficit, kv_copy
from kamera.store import CanonicalRecord, PatchRecord
from kamera.window import former_of, keep_orbit
from lab.speed.content import noise_kv, words
from lab.speed.moves import Deck
from lab.speed.presets import Preset, preset
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.stock import POLICY, Stock
from lab.speed.table import GOALS, Result, Row, Section, goal, model_facts, result
from lab.speed.timing import Arm, Measured, Spread, measure

ANTECEDENTS = 8
"""Chunks, each as long as the one compiled, that it is conditioned on."""
ORBIT = 4
"""Antecedents of the orbit patch."""
ORBIT_TOKENS = 64
"""Tokens of the chunks of the orbit patch: how many forwards it takes does not depend on it."""

CANONICAL, CONDITIONED = "canonical forward", "conditioned forward"
DEFICIT, FACTORS, STORING = "deficit", "factorisation", "storing"
RECALL, APPEND = "recall", "append of a new chunk"
_NONE = 1e-9  # seconds

NOTES = (
    f"conditioned: behind {ANTECEDENTS} chunks of the same length; text, so that no vision tower is in it",
    f"factorisation: at the default policy, rank {POLICY.rank} in {POLICY.patch_bytes:.0%} of the KV's bytes",
    "storing: canonical and patch to a directory, each made durable; recall: operation alone, from memory",
    "append: prefill in context, canonical forward, patch and storing in memory, as one call of a window",
    "reuses: extra seconds over those one reuse saves (conditioned forward less recall), round by round",
    "orbit: a conditioned forward is one prefill of antecedents and chunk; prefixes in common are run once",
)


def run(settings: Settings, step: Step = unwatched) -> Result:
    """Measure chunks of every length, and the forwards of an orbit patch."""
    chosen = preset(settings.preset)
    backbone = settings.build(chosen)
    parts: list[Row] = []
    even: list[Row] = []
    for done, tokens in enumerate(settings.lengths):
        step(done, len(settings.lengths) + 1)
        timed = measure(
            list(arms(backbone, chosen, tokens)),
            settings.device,
            rounds=settings.rounds,
            min_rounds=settings.min_rounds,
            seconds=settings.seconds,
        )
        parts += part_rows(timed, tokens)
        even += even_rows(timed, tokens)
    step(len(settings.lengths), len(settings.lengths) + 1)
    orbit = orbit_row(backbone, chosen)
    step(len(settings.lengths) + 1, len(settings.lengths) + 1)
    sections = [
        Section("Forming a patch, part by part", tuple(parts)),
        Section("Reuses until it is repaid", tuple(even)),
        Section(f"Orbit patch of {ORBIT} antecedents", (orbit,)),
        Section(GOALS, tuple(goals(parts, even, orbit, settings.device))),
    ]
    return result("compile", settings, model_facts(chosen, backbone), sections, NOTES)


def arms(backbone: HfEngine, chosen: Preset, tokens: int) -> Sequence[Arm]:
    """Every part of forming a patch of a chunk of ``tokens`` tokens, and the recall that repays it."""
    deck = Deck(
        Stock(backbone, chosen, ChunkStore.open("memory://", memory_limit="16GiB"), tokens), ANTECEDENTS
    )
    anchor, seeds = former_of(deck.window).anchor, count()
    in_front = anchor.length + ANTECEDENTS * tokens
    span = backbone.encode(backbone.chunk_from_tensors(words(backbone, tokens, seed=next(seeds))))
    alone, there = (
        torch.arange(start, start + tokens).expand(backbone.axes, -1) for start in (anchor.length, in_front)
    )
    context = noise_kv(backbone, in_front, seed=1)

    def forward(positions: torch.Tensor, past: KV) -> KV:
        kv, _ = forwards.run(backbone, span, positions, forwards.make_cache(backbone, [past]))
        return kv_copy(kv)

    canonical, conditioned = forward(alone, anchor.kv), forward(there, context)
    offset = [ANTECEDENTS * tokens] * backbone.axes
    deltas = deficit(conditioned, canonical, backbone.layout, offset)
    (patch, _), filled = POLICY.budget.form(deltas, backbone.layout, canonical)
    owner, ids = deck.stock.context, (deck.stock.chunk(0).id, deck.stock.chunk(1).id)
    records = (
        CanonicalRecord(ids[0], owner, span.input_ids, alone, canonical),
        PatchRecord(ids[0], owner, ids[1:], "exact", patch, "exact", filled.to_info()),
    )
    recall = next(m for m in deck.moves() if m.name == RECALL)
    return (
        Arm(
            CANONICAL,
            lambda past: forwards.run(backbone, span, alone, past),
            lambda: forwards.make_cache(backbone, [anchor.kv]),
        ),
        Arm(
            CONDITIONED,
            lambda past: forwards.run(backbone, span, there, past),
            lambda: forwards.make_cache(backbone, [context]),
        ),
        Arm(DEFICIT, lambda: deficit(conditioned, canonical, backbone.layout, offset)),
        Arm(FACTORS, lambda: POLICY.budget.form(deltas, backbone.layout, canonical)),
        _storing(*records),
        deck.arm(recall),
        _append(APPEND, deck, seeds),
    )


def _storing(canonical: CanonicalRecord, patch: PatchRecord) -> Arm:
    """Both into a fresh directory."""

    def before() -> tuple[tempfile.TemporaryDirectory[str], ChunkStore]:
        folder = tempfile.TemporaryDirectory(prefix="kamera-compile-")
        return folder, ChunkStore.open(folder.name, memory_limit=0)

    def run(into: tuple[tempfile.TemporaryDirectory[str], ChunkStore]) -> object:
        into[1].put(canonical)
        into[1].put(patch)
        return into

    return Arm(STORING, run, before)


def _append(name: str, deck: Deck, seeds: Iterator[int]) -> Arm:
    """A chunk that nobody has seen, at the tail."""

    def before() -> Chunk:
        deck.ready(deck.chunks)
        return deck.stock.backbone.chunk_from_tensors(
            words(deck.stock.backbone, deck.stock.tokens, seed=next(seeds))
        )

    return Arm(name, lambda chunk: deck.window.append(chunk), before)


def part_rows(timed: Measured, tokens: int) -> list[Row]:
    """One row for every part, each held against the conditioned forward."""
    return [
        {
            "tokens": tokens,
            "part": name,
            "ms": timed.spread(name).times(1e3),
            "share of the conditioned forward": timed.ratio(name, CONDITIONED),
        }
        for name in timed.seconds
    ]


def even_rows(timed: Measured, tokens: int) -> list[Row]:
    """After how many reuses each way of compiling is repaid."""
    extra = {
        "harvested from a prefill that happens anyway": (CANONICAL, DEFICIT, FACTORS, STORING),
        "compiled ahead": (CONDITIONED, CANONICAL, DEFICIT, FACTORS, STORING),
    }
    return [
        {"tokens": tokens, "way": way, "reuses": Spread.of(break_even(timed, of))}
        for way, of in extra.items()
    ]


def break_even(timed: Measured, extra: Sequence[str]) -> list[float]:
    """Round by round, the seconds of ``extra`` over those that one reuse saves; beyond all bounds if none."""
    seconds = timed.seconds
    saved = (max(c - r, _NONE) for c, r in zip(seconds[CONDITIONED], seconds[RECALL], strict=True))
    spent = (sum(parts) for parts in zip(*(seconds[name] for name in extra), strict=True))
    return [e / s for e, s in zip(spent, saved, strict=True)]


def orbit_row(backbone: HfEngine, chosen: Preset) -> Row:
    """What forming one orbit patch runs through the decoder."""
    stock = Stock(backbone, chosen, ChunkStore.open("memory://"), ORBIT_TOKENS)
    deck = Deck(stock, ORBIT + 1)
    report = keep_orbit(deck.window, ORBIT)
    return {
        "antecedents": ORBIT,
        "tokens": ORBIT_TOKENS,
        "forwards": report.forwards,
        "in tokens, times the chunk": report.tokens_recomputed / ORBIT_TOKENS,
        "in tokens, times the window": report.tokens_recomputed / ORBIT_TOKENS / (ORBIT + 1),
        "ms": 1e3 * report.seconds,
    }


def goals(parts: Sequence[Row], even: Sequence[Row], orbit: Row, device: str) -> list[Row]:
    """The goals this benchmark has figures for, at the longest chunk."""
    limit = 0.05 if device.startswith("cuda") else 0.2
    share = [row["share of the conditioned forward"] for row in parts if row["part"] == FACTORS][-1]
    windows = orbit["in tokens, times the window"]
    assert isinstance(share, Spread) and isinstance(windows, float)
    out = [goal("factorisation: share of the conditioned forward", share, most=limit)]
    for row in even[-2:]:
        assert isinstance(row["reuses"], Spread)
        out.append(goal(f"reuses until a patch is repaid, {row['way']}", row["reuses"], most=2.0))
    return [*out, goal(f"orbit patch, K = {ORBIT}: conditioned forwards", windows, most=5.0)]
