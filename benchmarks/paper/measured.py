"""Every arm that a claim needs, in windows of held-out episodes of the testbed's world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np
import torch

from benchmarks import intervals
from benchmarks.paper.bed import Bed, Source, patched
from benchmarks.report import progress
from kamera import Chunk, Patch, testbed
from kamera.ops import Deltas, kv_bytes, mean_deficit

HELD_OUT = 950_000
"""Seed of the episodes; backbones were trained from 1 000 000."""
LAYOUTS = ("LLRLRLPPPI", "LRLLLRPPPI")
"""Three antecedents, three frames that stand in for them, three pictures without facts, the items frame."""
MAIN, OTHERS, PICTURES, ITEMS = (0, 1, 2), (3, 4, 5), (6, 7, 8), 9
RANK, RANKS = 16, (4, 8, 16, 32, 64)
ASKED = 12
"""Questions of a window at most."""


@dataclass
class Found:
    """One value a question by arm, and one value a window by name."""

    right: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kl: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def accuracy(self, arm: str) -> intervals.Estimate:
        """The share of right answers."""
        return intervals.mean(self.right[arm])

    def eta(self, arm: str, blind: str = "blind") -> intervals.Estimate:
        """The share of blind reuse's KL that the arm gives back."""
        return intervals.eta(self.kl[arm], self.kl[blind])

    def number(self, name: str) -> intervals.Estimate:
        """The mean over windows."""
        return intervals.mean(self.numbers[name])


class Window:
    """The items frame behind others, with questions whose answers those bind; the re-prefill answers once."""

    def __init__(self, bed: Bed, episode: testbed.Episode, order: Sequence[int], chunks: list[Chunk]) -> None:
        self.bed, self.front = bed, [chunks[i] for i in order]
        *self.before, self.true = bed.prefill([*self.front, chunks[ITEMS]])
        window = (*order, ITEMS)
        asked = [episode.ask("value", tag, order=window) for tag in episode.frames[ITEMS].glyph_of]
        self.asked = [q for q in asked if q.bound][:ASKED]
        self.easy = [episode.ask("glyph", q.subject, order=window) for q in self.asked]
        self._reference: dict[bool, torch.Tensor] = {}

    def judge(self, found: Found, arm: str, source: Source, *, easy: bool = False) -> None:
        """Ask an arm the questions, or the one-hop control."""
        asked = self.easy if easy else self.asked
        if not asked:
            return
        texts = [q.text for q in asked]
        if easy not in self._reference:
            self._reference[easy] = self.bed.logits(texts, [*self.before, self.true])
        true = self._reference[easy]
        ours = true if source is self.true else self.bed.logits(texts, [*self.before, source])
        tokenize = self.bed.engine.builder.tokenize
        answers = torch.tensor([int(tokenize(q.answer)[0]) for q in asked])
        found.right[arm] += (ours.argmax(-1) == answers).double().tolist()
        found.kl[arm] += (ours.exp() * (ours - true)).sum(-1).clamp_min(0).tolist()


def measure(bed: Bed, windows: int, seed: int) -> Found:
    """What was found in so many windows."""
    found, world = Found(), testbed.World(HELD_OUT + seed)
    for index in range(windows):
        episode = world.episode(index, layout=LAYOUTS[index % len(LAYOUTS)])
        chunks = [bed.engine.chunk(frame.content) for frame in episode.frames]
        with torch.no_grad():
            _main(bed, episode, chunks, found)
            _distractors(bed, episode, chunks, found)
        progress(f"window {index + 1} of {windows}")
    return found


def _main(bed: Bed, episode: testbed.Episode, chunks: list[Chunk], found: Found) -> None:
    window = Window(bed, episode, MAIN, chunks)
    (alone,) = bed.prefill([chunks[ITEMS]])
    deltas = bed.deficit(window.true, alone)
    window.judge(found, "re-prefill", window.true)
    window.judge(found, "blind", alone)
    window.judge(found, "re-prefill, one hop", window.true, easy=True)
    window.judge(found, "blind, one hop", alone, easy=True)
    for rank in RANKS:
        served = patched(alone, deltas, rank)
        window.judge(found, f"patch {rank}", served)
        assert served.patch is not None
        found.numbers[f"bytes {rank}"].append(served.patch.nbytes / kv_bytes(alone.kv))
    orders = [bed.prefill([*order, chunks[ITEMS]])[-1] for order in list(permutations(window.front))[1:]]
    orbit = mean_deficit([bed.deficit(source, alone) for source in orders])
    window.judge(found, "orbit", patched(alone, orbit, RANK))
    for turned in (1, 3):
        stood = [*[chunks[i] for i in OTHERS[:turned]], *window.front[turned:]]
        was = bed.deficit(bed.prefill([*stood, chunks[ITEMS]])[-1], alone)
        window.judge(found, f"stale, {turned} replaced", patched(alone, was, RANK))
    departed = bed.prefill([chunks[OTHERS[0]], *window.front, chunks[ITEMS]])[-1]
    window.judge(found, "survivor", departed)
    layers = len(bed.layout)
    served = patched(alone, deltas, RANK)
    assert served.patch is not None
    window.judge(found, "deeper half", replace(served, patch=_deep(served.patch, layers // 2)))
    _spectrum(deltas, window.true, found)


def _distractors(bed: Bed, episode: testbed.Episode, chunks: list[Chunk], found: Found) -> None:
    """Pictures without facts come in front: the old patch, moved, and one that is formed again."""
    front = MAIN[:2]
    (alone,) = bed.prefill([chunks[ITEMS]])
    old = bed.deficit(bed.prefill([*[chunks[i] for i in front], chunks[ITEMS]])[-1], alone)
    window = Window(bed, episode, (*PICTURES, *front), chunks)
    window.judge(found, "distractors, blind", alone)
    window.judge(found, "distractors, stale", patched(alone, old, RANK))
    window.judge(found, "distractors, fresh", patched(alone, bed.deficit(window.true, alone), RANK))


def _deep(patch: Patch, first: int) -> Patch:
    """The patch on the layers from ``first`` on."""
    return Patch.of([f if i >= first else {} for i, f in enumerate(patch.layers)], patch.groups)


def _spectrum(deltas: Deltas, true: Source, found: Found) -> None:
    """How large the deficit is by depth, how many directions and tokens hold nine tenths of its energy."""
    by_layer, directions, tokens = [], [], []
    for layer, whole in zip(deltas, true.kv, strict=True):
        energy = sum(float(x.double().square().sum()) for x in layer.values())
        size = sum(float(x.double().square().sum()) for x in whole.values())
        if energy < 1e-9 * size:  # the first layer sees no other token before it
            continue
        by_layer.append((energy / size) ** 0.5)
        for x in layer.values():
            rows = x.double().movedim(-2, 0).flatten(1) if x.dim() == 3 else x.double()
            values = torch.linalg.svdvals(rows).square()
            directions.append(_nine_tenths(values) / len(rows))
            tokens.append(_nine_tenths(rows.square().sum(1).sort(descending=True).values) / len(rows))
    found.numbers["deficit, last over first layer"].append(by_layer[-1] / by_layer[0])
    found.numbers["directions"].append(float(np.max(directions)))
    found.numbers["tokens"].append(float(np.mean(tokens)))


def _nine_tenths(values: torch.Tensor) -> int:
    return int((values.cumsum(0) < 0.9 * values.sum()).sum()) + 1
