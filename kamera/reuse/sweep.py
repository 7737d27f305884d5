"""The sweep that calibrates approximate reuse on the model at hand: drift by context, depth and probe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from kamera.content import Chunk, Encoded
from kamera.engines.hf import Backbone
from kamera.ops import KV, PatchBudget, kv_concat, relocate_kv, uniform_offset
from kamera.reuse.calibration import Calibration, Point
from kamera.reuse.forwards import answered, divergence, shown
from kamera.reuse.probe import likeness
from kamera.window import grounds_of, library_versions

BOUND = 0.05
"""Largest accepted drift: KL to the re-prefill's next token, in nats."""

LEAST = 20
"""Trials that pass the guard, below which a threshold is not believed."""

REFUSED = 5
"""Trials beyond the bound below which a sweep proves nothing: it did not reach what the model binds."""


@dataclass(frozen=True, eq=False)
class Case:
    """A segment to be reused: ``chunk`` behind the chunks ``before``, with text ``questions`` ``[tokens]``.

    Each of ``others`` are antecedents it was stored behind, and the tokens directly before the segment in
    which they equal ``before``.
    """

    before: tuple[Chunk, ...]
    chunk: Chunk
    questions: tuple[torch.Tensor, ...]
    others: tuple[tuple[int, tuple[Chunk, ...]], ...]


@dataclass(frozen=True)
class Trial:
    """One segment reused behind another left context, of which the last ``matched`` tokens are equal.

    ``kl[i]``: drift with the KV of the first ``i + 1`` layers reused and the rest exact, of the worst
    question. ``cosine``: the probe of all layers. ``agrees``: with all layers reused every next token is the
    re-prefill's.
    """

    matched: int
    kl: tuple[float, ...]
    cosine: float
    agrees: bool


def calibrate(
    backbone: Backbone, cases: Iterable[Case], *, bound: float = BOUND, model: str = ""
) -> Calibration:
    """Run ``cases`` and derive the guard's windows and the probe's threshold.

    Cases must be of the kind that will be served, and contain what the model binds across segments: a
    threshold is given only if some of them drift beyond ``bound``. Raises `ValueError` without cases,
    UnsupportedBackbone if single tokens of a segment cannot run alone.
    """
    return derive(backbone, [t for case in cases for t in run(backbone, case)], bound=bound, model=model)


def derive(
    backbone: Backbone, trials: Sequence[Trial], *, bound: float = BOUND, model: str = ""
) -> Calibration:
    """The calibration of trials that were run on ``backbone``. Raises `ValueError` without any."""
    if not trials:
        raise ValueError("no case to calibrate with: give segments behind different left contexts")
    windows = windows_of(trials, bound)
    grounds = grounds_of(backbone, PatchBudget(1))
    return Calibration(
        fingerprint=grounds.fingerprint,
        model=model or type(backbone.model).__name__,
        dtype=grounds.dtype,
        vocabulary=grounds.vocabulary,
        position_limit=grounds.position_limit,
        versions=library_versions(),
        bound=bound,
        windows=windows,
        threshold=operating_point(trials, windows, bound),
        curve=acceptance(trials),
        trials=len(trials),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def cases_of(
    backbone: Backbone,
    documents: Sequence[Sequence[int]],
    *,
    count: int = 24,
    context: int = 128,
    segment: int = 48,
    question: int = 16,
    ladder: Sequence[int] = (0, 16, 32, 64),
    seed: int = 0,
) -> list[Case]:
    """``count`` cases out of documents (token ids): each a run of one, stored behind other left contexts.

    Other left contexts equal the true one in their last tokens (each length of ``ladder``). Before those they
    are another document's, or, in every second case, the true ones with every eighth token changed. Raises
    `ValueError` for fewer than two documents, or ones shorter than a case.
    """
    need = context + segment + question
    usable = [torch.as_tensor(list(d), dtype=torch.int64) for d in documents if len(d) >= need]
    if len(usable) < 2:
        raise ValueError(f"{len(usable)} documents have {need} tokens or more: give at least two")
    if not all(0 <= w < context for w in ladder):
        raise ValueError(f"ladder {tuple(ladder)} must lie between 0 and the {context} tokens of context")
    generator = torch.Generator().manual_seed(seed)
    out = []
    for number in range(count):
        own, other = (usable[int(i)] for i in torch.randperm(len(usable), generator=generator)[:2])
        at = int(torch.randint(len(own) - need + 1, (1,), generator=generator))
        before, rest = own[at : at + context], own[at + context : at + need]
        changed = before.clone() if number % 2 else other[:context].clone()
        if number % 2:
            changed[::8] = other[:context][::8]

        def behind(
            matched: int, changed: torch.Tensor = changed, before: torch.Tensor = before
        ) -> tuple[Chunk, ...]:
            ids = torch.cat([changed[: context - matched], before[context - matched :]])
            return (backbone.chunk_from_tensors(ids),)

        out.append(
            Case(
                (backbone.chunk_from_tensors(before),),
                backbone.chunk_from_tensors(rest[:segment]),
                (rest[segment:],),
                tuple((w, behind(w)) for w in ladder),
            )
        )
    return out


def run(backbone: Backbone, case: Case) -> list[Trial]:
    """The trials of one case; left contexts behind which the segment does not move as a whole are skipped."""
    ids = [c.input_ids for c in (*case.before, case.chunk)]
    inputs = [c.position_inputs() for c in (*case.before, case.chunk)]
    asked = [backbone.positions([*ids, q], [*inputs, {}])[:, -len(q) :] for q in case.questions]
    encoded = backbone.encode(case.chunk)
    context, exact, positions = _behind(backbone, case.before, case.chunk, encoded)

    def answers(kv: KV) -> list[torch.Tensor]:
        pairs = zip(case.questions, asked, strict=True)
        return [answered(backbone, question, at, [context, kv]) for question, at in pairs]

    truth = answers(exact)
    trials = []
    for matched, other in case.others:
        _, stored, home = _behind(backbone, other, case.chunk, encoded)
        offset = uniform_offset(home, positions)
        if offset is None:
            continue
        held = relocate_kv(stored, backbone.layout, offset)
        kl, agrees = [], True
        for layers in range(1, len(backbone.layout) + 1):
            said = answers((*held[:layers], *exact[layers:]))
            kl.append(max(divergence(a, b) for a, b in zip(truth, said, strict=True)))
            agrees = all(bool(a.argmax() == b.argmax()) for a, b in zip(truth, said, strict=True))
        cosine = float(likeness(backbone, encoded, positions, context, held).min())
        trials.append(Trial(matched, tuple(kl), cosine, agrees))
    return trials


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


def operating_point(trials: Sequence[Trial], windows: Sequence[int | None], bound: float) -> float | None:
    """The least cosine of the trials that the guard lets pass, all of which stay below ``bound``.

    A threshold over all trials would not do: probed tokens may be alike where others are not (docs/reuse.md).
    None if no left context is enough, if fewer than `LEAST` trials pass, or if fewer than `REFUSED` of all
    trials exceed ``bound``.
    """
    least = windows[-1]
    passing = [t.cosine for t in trials if least is not None and t.matched >= least]
    if len(passing) < LEAST or sum(t.kl[-1] > bound for t in trials) < REFUSED:
        return None
    return min(passing)


def _behind(
    backbone: Backbone, before: Sequence[Chunk], chunk: Chunk, encoded: Encoded
) -> tuple[KV, KV, torch.Tensor]:
    """KV of ``before``, KV of the segment behind it, and the segment's positions ``[axes, tokens]``."""
    spans = (*before, chunk)
    whole = backbone.positions([c.input_ids for c in spans], [c.position_inputs() for c in spans])
    parts = whole.split([c.num_tokens for c in spans], dim=1)
    held: list[KV] = []
    for one, at in zip((*map(backbone.encode, before), encoded), parts, strict=True):
        live = shown(backbone, held, one.num_tokens) if held else None
        held.append(backbone.prefill(one, at, live))
    return kv_concat(held[:-1]), held[-1], parts[-1]
