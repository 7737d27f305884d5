"""The KV that windows show compared with the true KV: per chunk, layer and channel, without a question.

Two comparisons, of copies read back from the live cache, as the serving kernels wrote them:

* *as said*: R(δ)(canonical + patch) by the slow reference, from the store's objects and a re-prefill's
  positions. Only the last rounding may differ, in every layer and every dtype.
* *as true*: the KV of a re-prefill. A patch keeps a part of the deficit Δ; as much of it must be served as
  the best patch within the budget keeps, less `SLACK`, and at its scale: ⟨served, Δ⟩ is ‖served‖² for factors
  of least error, whatever their rank, since what they leave out is orthogonal to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kamera.engines import Span
from kamera.engines.hf import compare_kv
from kamera.ops import KV, Deltas, Layout, Patch, PatchBudget, deficit, exact_kv, floats
from kamera.ops import uniform_offset as offset_between
from kamera.window import KameraWindow, ShownSpan, former_of

SLACK = 0.02
"""Share of what a patch keeps that may be lost, and by which its scale may be off: a patch of 0.97 fails."""

CODED = 0.05
"""Share by which the scale of factors in few bits may be off: what 4 bits with a scale per column cost."""

SPARE = 2.0
"""Times the worth (energy by length) of the weakest direction kept that one left out may have."""

HALF = 0.5
"""Least share of a channel's deficit that is restored over all layers. A patch within its bytes may leave out
a layer; one that leaves out most of a channel has no budget for this model, or is formed wrongly."""


def _rounding(dtype: torch.dtype) -> float:
    """Share of a KV's energy that counts as rounding between the model's own turn of a key and ours."""
    return max(1e-4, torch.finfo(dtype).eps / 2) ** 2


def spans_of(window: KameraWindow, positions: torch.Tensor) -> list[Span]:
    """The chunks of a window that were all served out of its store, as its objects tell; the first leads.

    ``positions`` ``[axes, tokens]`` are those of the same chunks in a window that prefilled them.
    """
    found, former = [], former_of(window)
    for slot in window.slots:
        record = former.store.get_canonical(former.context, slot.chunk_id)
        assert record is not None, "a window served it out of this store"
        offset = offset_between(record.positions, positions[:, slot.start : slot.start + slot.length])
        assert offset is not None, "a window served it at this place"
        patch = former.store.get_patch(former.context, slot.chunk_id, slot.antecedents)
        held = None if patch is None else patch.patch.truncate(former.budget.rank)
        found.append(Span(former.backbone.place(record.kv), held, offset))
    return found


@dataclass(frozen=True)
class KVComparison:
    """What is wrong with KV (``flaw``), and what a patch of its size does not hold (``lack``).

    One line each, empty if nothing is.
    """

    flaw: str = ""
    lack: str = ""

    def __and__(self, other: KVComparison) -> KVComparison:
        """Both: the first flaw, and the first lack."""
        return KVComparison(self.flaw or other.flaw, self.lack or other.lack)


@dataclass(frozen=True)
class _Energies:
    """Energies of a chunk's channel in one layer: of its KV, its deficit, and what a patch leaves of that.

    ``gap`` is the distance of the best patch's scale from 1, as an energy: that of its codes. ``omitted``:
    the patch leaves the channel out, although a direction of it is worth more than one kept elsewhere.
    """

    whole: float
    lacking: float
    left: float
    gap: float
    omitted: bool = False


@dataclass(frozen=True, eq=False)
class Truth:
    """The chunks of a window (`spans_of`), their ``true`` KV (a re-prefill's), and the patches' ``budget``.

    The first chunk leads and has no deficit.
    """

    spans: Sequence[Span]
    true: Sequence[KV]
    layout: Layout
    budget: PatchBudget

    def compare(self, served: Sequence[KV], *, said: bool = True) -> KVComparison:
        """Served KV of the same chunks; ``said`` asks whether it is what their stored patches say, too."""
        flaw = next(self._unlike_said(served), "") if said else ""
        sums: dict[str, list[float]] = {}
        for n, (kv, span) in enumerate(zip(served, self.spans, strict=True)):
            ours = deficit(kv, span.kv, self.layout, span.offset)
            for i, spec in enumerate(self.layout):
                for c in spec.channels:
                    lacking, got = self._deficits[n][i][c.name], ours[i][c.name]
                    kept = self._energies[n][i, c.name]
                    off, rounding = _energy(lacking - got), _rounding(kv[i][c.name].dtype) * kept.whole
                    total = sums.setdefault(c.name, [0.0, 0.0])
                    total[0] += off
                    total[1] += max(kept.lacking, rounding)
                    why = _wrong(kept, off, _energy(got), _inner(got, lacking), rounding)
                    flaw = flaw or (f"in layer {i} channel {c.name} of chunk {n + 1} {why}" if why else "")
        lacks = [f"{1 - off / all_:.2f} in {name}" for name, (off, all_) in sums.items() if off > HALF * all_]
        lack = f"of what blind reuse lacks, the served KV has {', '.join(lacks)}" if lacks else ""
        return KVComparison(flaw, lack)

    @cached_property
    def _deficits(self) -> list[Deltas]:
        return [
            deficit(kv, span.kv, self.layout, span.offset)
            for kv, span in zip(self.true, self.spans, strict=True)
        ]

    @cached_property
    def _energies(self) -> list[dict[tuple[int, str], _Energies]]:
        """What the best patch of each chunk keeps, formed again from a re-prefill; the first has none."""
        found = []
        for n, (deltas, span) in enumerate(zip(self._deficits, self.spans, strict=True)):
            patch = self.budget.form(deltas, self.layout, span.kv).formed.patch if n else None
            worth = math.inf if patch is None else _least_worth(patch)
            kept = {}
            for i, layer in enumerate(deltas):
                for name, delta in layer.items():
                    whole, lacking = _energy(self.true[n][i][name]), _energy(delta)
                    factors = patch.layers[i].get(name) if patch is not None else None
                    if factors is None:
                        # its strongest direction has at least the mean energy of all
                        each = lacking / min(delta.shape) / sum(delta.shape)
                        kept[i, name] = _Energies(whole, lacking, lacking, 0.0, each > SPARE * worth)
                        continue
                    best = factors.dense().to(delta)
                    gap = min(abs(_inner(best, delta - best)), CODED * _energy(best))
                    kept[i, name] = _Energies(whole, lacking, _energy(delta - best), gap)
            found.append(kept)
        return found

    @cached_property
    def _expected(self) -> list[KV]:
        """What the store's objects say of each chunk, rounded once."""
        return [exact_kv(span.kv, span.patch, self.layout, span.offset) for span in self.spans]

    def _unlike_said(self, served: Sequence[KV]) -> Iterator[str]:
        places = zip(served, self._expected, self.spans, strict=True)
        for n, (ours, want, span) in enumerate(places, 1):
            for found in compare_kv(ours, want, span.offset):
                if not found.holds:
                    yield (
                        f"in {found.worst} of chunk {n} the kernels do not serve what canonical and patch "
                        f"say: off by {found.error:.1e}, over {found.tolerance:.0e}"
                    )


def error_of_move(
    before: Sequence[ShownSpan], after: Sequence[ShownSpan], kept: Sequence[int], layout: Layout
) -> str:
    """What is wrong with spans that stayed in a window while others left, "" if nothing is.

    ``kept`` are the indices in ``before`` of those in ``after``. Each must be the KV it was, turned by the
    difference of its positions.
    """
    for span, index in zip(after, kept, strict=True):
        was = before[index]
        offset = offset_between(was.positions, span.positions)
        if offset is None:
            return f"span {index} was torn apart by a move"
        for found in compare_kv(span.kv, exact_kv(was.kv, None, layout, offset), offset):
            off, most = found.error, 8 * found.tolerance  # the first copy was rounded, too
            if not off <= most:
                return f"in {found.worst} of span {index} a move is off by {off:.1e}, over {most:.0e}"
    return ""


def _least_worth(patch: Patch) -> float:
    """The energy of the weakest direction that a patch keeps, by the length of its factors."""
    worths = []
    for f in (f for layer in patch.layers for f in layer.values()):
        left, right = (floats(side)[:, -1].double().square().sum() for side in (f.left, f.right))
        worths.append(float(left * right) / (f.left.shape[0] + f.right.shape[0]))
    return min(worths, default=0.0)


def _wrong(kept: _Energies, off: float, served: float, met: float, rounding: float) -> str:
    """What is wrong with a deficit of energy ``served``; ``met`` is its inner product with the true one."""
    best = kept.lacking - kept.left
    if kept.omitted and kept.lacking > rounding:
        return "the patch leaves out a deficit that is worth more than what it keeps elsewhere"
    if not off <= kept.left + SLACK * max(best, 0.0) + rounding:
        lacking = max(kept.lacking, 1e-30)
        return (
            f"the served KV restores {1 - off / lacking:.2f} of the deficit, a patch of its size "
            f"{1 - kept.left / lacking:.2f}"
        )
    if not abs(met - served) <= SLACK * served + kept.gap + rounding:
        return f"the deficit is served at {served / met if met else 0.0:.2f} of its scale"
    return ""


def _energy(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _inner(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() * y.double()).sum())
