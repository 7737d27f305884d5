"""The sweep that calibrates approximate reuse on the model at hand: drift by context, depth and probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from kamera.engines.hf import Backbone
from kamera.ops import KV, PatchBudget
from kamera.reuse.calibration import Calibration, Point
from kamera.reuse.forwards import answered, divergence, places, prefilled
from kamera.reuse.probe import likeness
from kamera.window import grounds_of, library_versions

BOUND = 0.05
"""Largest accepted drift: KL to the re-prefill's next token, in nats."""

LEAST = 20
"""Accepted trials below which a threshold is not believed."""


@dataclass(frozen=True)
class Trial:
    """One segment reused behind another left context, of which the last ``matched`` tokens are equal.

    ``kl[i]``: drift with the KV of the first ``i + 1`` layers reused and the rest exact. ``cosine``: the
    probe of all layers. ``agrees``: with all layers reused the next token is the re-prefill's.
    """

    matched: int
    kl: tuple[float, ...]
    cosine: float
    agrees: bool


def calibrate(
    backbone: Backbone,
    documents: Sequence[Sequence[int]],
    *,
    trials: int = 48,
    context: int = 128,
    segment: int = 48,
    question: int = 16,
    ladder: Sequence[int] = (0, 16, 32, 64),
    bound: float = BOUND,
    seed: int = 0,
    model: str = "",
) -> Calibration:
    """Sweep ``documents`` (token ids) and derive the guard's windows and the probe's threshold.

    Each of ``trials`` takes a segment behind ``context`` tokens of its document, and reuses KV of the segment
    behind another left context: all of another document but the last tokens (each length of ``ladder``), or,
    in every second trial, the same document with every eighth of the other tokens changed. Raises
    `ValueError` for fewer than two documents, or ones shorter than a trial.
    """
    need = context + segment + question
    usable = [torch.as_tensor(list(d), dtype=torch.int64) for d in documents if len(d) >= need]
    if len(usable) < 2:
        raise ValueError(f"{len(usable)} documents have {need} tokens or more: give at least two")
    if not all(0 <= w < context for w in ladder):
        raise ValueError(f"ladder {tuple(ladder)} must lie between 0 and the {context} tokens of context")
    made: list[Trial] = []
    generator = torch.Generator().manual_seed(seed)
    for number in range(trials):
        own, other = (usable[int(i)] for i in torch.randperm(len(usable), generator=generator)[:2])
        at = int(torch.randint(len(own) - need + 1, (1,), generator=generator))
        before, rest = own[at : at + context], own[at + context : at + need]
        changed = before.clone() if number % 2 else other[:context].clone()
        if number % 2:
            changed[::8] = other[:context][::8]
        case = _Case(backbone, before, rest[:segment], rest[segment:])
        made += [case.trial(torch.cat([changed[: context - w], before[context - w :]]), w) for w in ladder]
    curve = acceptance(made)
    grounds = grounds_of(backbone, PatchBudget(1))
    return Calibration(
        fingerprint=grounds.fingerprint,
        model=model or type(backbone.model).__name__,
        dtype=grounds.dtype,
        vocabulary=grounds.vocabulary,
        position_limit=grounds.position_limit,
        versions=library_versions(),
        bound=bound,
        windows=windows_of(made, bound),
        threshold=operating_point(made, curve, bound),
        curve=curve,
        trials=len(made),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def windows_of(trials: Sequence[Trial], bound: float) -> tuple[int | None, ...]:
    """By number of reused layers, the least matched length from which on no trial exceeds ``bound``."""
    lengths = sorted({t.matched for t in trials})
    out: list[int | None] = []
    for layer in range(len(trials[0].kl)):
        least = None
        for length in reversed(lengths):
            if any(t.kl[layer] > bound for t in trials if t.matched == length):
                break
            least = length
        out.append(least)
    return tuple(out)


def acceptance(trials: Sequence[Trial]) -> tuple[Point, ...]:
    """The curve over the probes' own cosines, from the loosest threshold to the strictest."""
    out = []
    for threshold in sorted({t.cosine for t in trials}):
        taken = [t for t in trials if t.cosine >= threshold]
        drifts = [t.kl[-1] for t in taken]
        agree = sum(t.agrees for t in taken) / len(taken)
        out.append(Point(threshold, len(taken) / len(trials), sum(drifts) / len(taken), max(drifts), agree))
    return tuple(out)


def operating_point(trials: Sequence[Trial], curve: Sequence[Point], bound: float) -> float | None:
    """The loosest threshold whose accepted trials all stay below ``bound``; None if they are too few."""
    for point in curve:
        count = round(point.accepted * len(trials))
        if point.worst is not None and point.worst <= bound and count >= LEAST:
            return point.threshold
    return None


class _Case:
    """A segment behind its true left context, and the next token that it should lead to."""

    def __init__(
        self, backbone: Backbone, before: torch.Tensor, segment: torch.Tensor, question: torch.Tensor
    ) -> None:
        self._backbone, self._before, self._segment, self._question = backbone, before, segment, question
        parts = places(backbone, [len(before), len(segment), len(question)])
        self._at_before, self._at_segment, self._at_question = parts
        self._context = self._prefill(before, self._at_before)
        self._exact = self._prefill(segment, self._at_segment, self._context)
        self._truth = self._answer(self._exact)

    def trial(self, other: torch.Tensor, matched: int) -> Trial:
        """The segment's KV behind ``other`` ``[context]`` reused here, by depth."""
        backbone = self._backbone
        held = self._prefill(self._segment, self._at_segment, self._prefill(other, self._at_before))
        kl, agrees = [], True
        for layers in range(1, len(backbone.layout) + 1):
            said = self._answer((*held[:layers], *self._exact[layers:]))
            kl.append(divergence(self._truth, said))
            agrees = bool(said.argmax() == self._truth.argmax())
        cosines = likeness(backbone, self._segment, self._at_segment, self._context, held)
        return Trial(matched, tuple(kl), min(cosines), agrees)

    def _prefill(self, ids: torch.Tensor, positions: torch.Tensor, *behind: KV) -> KV:
        return prefilled(self._backbone, ids, positions, behind)

    def _answer(self, kv: KV) -> torch.Tensor:
        return answered(self._backbone, self._question, self._at_question, [self._context, kv])
