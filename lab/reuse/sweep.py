"""The sweep that calibrates approximate reuse on the model at hand: drift by context, depth and probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import Engine
from kamera.ops import KV, PatchBudget, kv_concat, kv_of, relocate_kv, uniform_offset
from kamera.reuse.calibration import Calibration, HeldOut, Point, kind, modality
from kamera.reuse.probe import likeness
from kamera.window import grounds_of, library_versions
from lab.reuse.forwards import answered, divergence, shown

BOUND = 0.05
"""Largest accepted drift: KL to the re-prefill's next token, in nats."""

LIMIT = 0.05
"""Largest upper confidence limit of the share of accepted cases that drift beyond the bound, and of those
with another next token: 59 accepted cases without one show it, 93 with one."""

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
    question; or one number, that of all layers. ``cosine``: the probe of all layers. ``agrees``: with all
    layers reused every next token is the re-prefill's. ``replaced``: one piece of the left context was
    replaced by another of its kind (`replacing`).
    """

    matched: int
    kl: tuple[float, ...]
    cosine: float
    agrees: bool
    replaced: bool = False


def calibrate(
    backbone: Engine, cases: Sequence[Case], *, bound: float = BOUND, model: str = ""
) -> Calibration:
    """Run ``cases``, derive the guard's windows and the probe's threshold from one half, and test the other.

    Cases must be of the kind that will be served, and contain what the model binds across segments: a
    threshold is given only if some of the first half drift beyond ``bound``, and if the second half bounds
    the share of those that would be served and drift (`LIMIT`). To the contexts that a case was stored behind
    come those with one piece replaced (`replacing`). Raises `ValueError` for fewer than two cases,
    UnsupportedBackbone if single tokens of a segment cannot run alone.
    """
    half = len(cases) // 2
    trials = [
        run(backbone, case, replacing(case, cases[number - 1]), by_depth=number < half)
        for number, case in enumerate(cases)
    ]
    return derive(backbone, cases, trials, bound=bound, model=model)


def derive(
    backbone: Engine,
    cases: Sequence[Case],
    trials: Sequence[Sequence[Trial]],
    *,
    bound: float = BOUND,
    model: str = "",
) -> Calibration:
    """The calibration of cases and the trials of each, which were run on ``backbone``.

    The first half of the cases is fitted, the second tested. Raises `ValueError` for fewer than two cases.
    """
    if len(cases) < 2:
        raise ValueError(
            "no case to calibrate with: give segments behind different left contexts, two or more"
        )
    half = len(cases) // 2
    fitted, rest = [t for of in trials[:half] for t in of], trials[half:]
    if not fitted:
        raise ValueError("no segment of the first half moves as a whole: give others")
    windows = windows_of(fitted, bound)
    threshold = operating_point(fitted, windows, bound)
    found = tested(rest, windows[-1], threshold, bound)
    replaced = tested([[t for t in of if t.replaced] for of in rest], windows[-1], threshold, bound)
    refusal = _refusal(threshold, found, replaced, bound)
    kinds = {kind(modality(c.chunk), modality(other)) for c in cases for other in c.before}
    grounds = grounds_of(backbone, PatchBudget(1))
    return Calibration(
        fingerprint=grounds.fingerprint,
        model=model or backbone.named.kind,
        dtype=grounds.dtype,
        vocabulary=grounds.vocabulary,
        position_limit=grounds.position_limit,
        versions=library_versions(),
        bound=bound,
        windows=windows,
        threshold=None if refusal else threshold,
        curve=acceptance(fitted),
        trials=len(fitted),
        tested=found,
        replaced=replaced,
        refusal=refusal,
        scope=tuple(sorted(kinds)),
        sources=tuple(sorted({c.chunk.label for c in cases})),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def tested(
    trials: Sequence[Sequence[Trial]], least: int | None, threshold: float | None, bound: float
) -> HeldOut:
    """What guard (``least`` equal tokens) and probe (``threshold``) accept of cases, given their trials."""
    accepted = violations = flips = 0
    for of in trials:
        taken = [
            t
            for t in of
            if least is not None and threshold is not None and t.matched >= least and t.cosine >= threshold
        ]
        accepted += bool(taken)
        violations += any(t.kl[-1] > bound for t in taken)
        flips += not all(t.agrees for t in taken)
    return HeldOut(len(trials), accepted, violations, flips)


def replacing(case: Case, other: Case) -> tuple[tuple[int, tuple[Chunk, ...]], ...]:
    """Contexts of a case in which one piece is replaced by that of ``other`` at its place: a legend, say.

    As `Case.others`. A piece that is the same in both, or of another modality, is left out.
    """
    out = []
    for at, (own, its) in enumerate(zip(case.before, other.before, strict=False)):
        if own.id != its.id and modality(own) == modality(its):
            same = sum(c.num_tokens for c in case.before[at + 1 :])
            out.append((same, (*case.before[:at], its, *case.before[at + 1 :])))
    return tuple(out)


def cases_of(
    backbone: Engine,
    documents: Sequence[Sequence[int]],
    *,
    count: int = 160,
    context: int = 128,
    segment: int = 48,
    question: int = 16,
    ladder: Sequence[int] = (0, 16, 32, 64),
    pieces: int = 4,
    sources: Sequence[str] = ("",),
    seed: int = 0,
) -> list[Case]:
    """``count`` cases out of documents (token ids): each a run of one, stored behind other left contexts.

    Other left contexts equal the true one in their last tokens (each length of ``ladder``). Before those they
    are another document's, or, in every second case, the true ones with every eighth token changed. The true
    one stands in ``pieces``. The first half of the cases is drawn from the first half of the documents, the
    second from the others. ``sources`` are the labels of the segments, in turn. Raises `ValueError` for fewer
    than four documents, or ones shorter than a case.
    """
    need = context + segment + question
    usable = [torch.as_tensor(list(d), dtype=torch.int64) for d in documents if len(d) >= need]
    if len(usable) < 4:
        raise ValueError(f"{len(usable)} documents have {need} tokens or more: give at least four")
    if not all(0 <= w < context for w in ladder):
        raise ValueError(f"ladder {tuple(ladder)} must lie between 0 and the {context} tokens of context")
    halves = usable[: len(usable) // 2], usable[len(usable) // 2 :]
    generator = torch.Generator().manual_seed(seed)
    out = []
    for number in range(count):
        of = halves[2 * number >= count]
        own, other = (of[int(i)] for i in torch.randperm(len(of), generator=generator)[:2])
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
                tuple(map(backbone.chunk_from_tensors, before.tensor_split(pieces))),
                backbone.chunk_from_tensors(rest[:segment], label=sources[number % len(sources)]),
                (rest[segment:],),
                tuple((w, behind(w)) for w in ladder),
            )
        )
    return out


def run(
    backbone: Engine,
    case: Case,
    replaced: Sequence[tuple[int, tuple[Chunk, ...]]] = (),
    *,
    by_depth: bool = True,
) -> list[Trial]:
    """The trials of one case; left contexts behind which the segment does not move as a whole are skipped.

    ``replaced`` are more contexts, as `Case.others`. Without ``by_depth`` only the drift of all layers is
    measured.
    """
    ids = [c.input_ids for c in (*case.before, case.chunk)]
    inputs = [c.position_inputs() for c in (*case.before, case.chunk)]
    asked = [backbone.positions([*ids, q], [*inputs, {}])[:, -len(q) :] for q in case.questions]
    chunks = {c.id: c for _, other in (*case.others, *replaced) for c in other}
    chunks |= {c.id: c for c in (*case.before, case.chunk)}
    encodings = {name: backbone.encode(c) for name, c in chunks.items()}
    encoded = encodings[case.chunk.id]
    context, exact, positions = _behind(backbone, case.before, case.chunk, encodings)

    def answers(kv: KV) -> list[torch.Tensor]:
        pairs = zip(case.questions, asked, strict=True)
        return [answered(backbone, question, at, [context, kv]) for question, at in pairs]

    truth, layers = answers(exact), len(backbone.layout)
    trials = []
    for number, (matched, other) in enumerate((*case.others, *replaced)):
        _, stored, home = _behind(backbone, other, case.chunk, encodings)
        offset = uniform_offset(home, positions)
        if offset is None:
            continue
        held = relocate_kv(stored, backbone.layout, offset)
        kl, agrees = [], True
        for reused in range(1 if by_depth else layers, layers + 1):
            said = answers(kv_of([*held[:reused], *exact[reused:]], exact.groups))
            kl.append(max(divergence(a, b) for a, b in zip(truth, said, strict=True)))
            agrees = all(bool(a.argmax() == b.argmax()) for a, b in zip(truth, said, strict=True))
        cosine = float(likeness(backbone, encoded, positions, context, held).min())
        trials.append(Trial(matched, tuple(kl), cosine, agrees, number >= len(case.others)))
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
    trials exceed ``bound``. It still has to be tested on others (`tested`).
    """
    least = windows[-1]
    passing = [t.cosine for t in trials if least is not None and t.matched >= least]
    if len(passing) < LEAST or sum(t.kl[-1] > bound for t in trials) < REFUSED:
        return None
    return min(passing)


def _refusal(threshold: float | None, found: HeldOut, replaced: HeldOut, bound: float) -> str:
    """The reason to give no threshold after a test; "" if it held."""
    if threshold is None:
        return "no left context that was tried bounds it, or too few trials drifted to tell"
    if replaced.violations:
        return (
            f"in {replaced.violations} of {replaced.accepted} held-out cases it accepted a segment behind a "
            f"replaced piece that drifts beyond {bound:g} nats"
        )
    for what, count, limit in (
        (f"drift beyond {bound:g} nats", found.violations, found.violation_limit),
        ("have another next token", found.flips, found.flip_limit),
    ):
        if limit > LIMIT:
            return (
                f"{count} of the {found.accepted} held-out cases it accepted {what}: the share of such cases "
                f"may be {limit:.3f} (at 95 %), more than {LIMIT:g}"
            )
    return ""


def _behind(
    backbone: Engine, before: Sequence[Chunk], chunk: Chunk, encodings: Mapping[str, Encoded]
) -> tuple[KV, KV, torch.Tensor]:
    """KV of ``before``, KV of the segment behind it, and the segment's positions ``[axes, tokens]``.

    ``encodings`` are those of all of them, by id.
    """
    spans = (*before, chunk)
    whole = backbone.positions([c.input_ids for c in spans], [c.position_inputs() for c in spans])
    parts = whole.split([c.num_tokens for c in spans], dim=1)
    held: list[KV] = []
    for span, at in zip(spans, parts, strict=True):
        live = shown(backbone, held, span.num_tokens) if held else None
        held.append(backbone.prefill(encodings[span.id], at, live))
    return kv_concat(held[:-1]), held[-1], parts[-1]
