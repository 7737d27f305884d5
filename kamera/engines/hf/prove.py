"""Numeric proofs on the live model: relocation is exact, a full-rank patch restores a prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kamera.content import Encoded
from kamera.errors import NonFiniteKV
from kamera.ops import KV, apply_patch, form_patch, relocate_kv

if TYPE_CHECKING:
    from kamera.engines.hf.backbone import Backbone


@dataclass(frozen=True)
class Proof:
    """Largest relative L2 error over layers and channels, against its tolerance.

    In float32 every layer counts. In half precision a second forward differs from the first by
    rounding alone (and by flipped expert choices), so only the first layer is held to the tolerance:
    no attention precedes it, and it shows any mistake in how the phase is turned.
    """

    error: float
    worst: str
    tolerance: float
    offset: tuple[int, ...]

    @property
    def holds(self) -> bool:
        """True when the error is within tolerance."""
        return self.error <= self.tolerance


def prove_relocation(
    backbone: Backbone, encoded: Encoded | None = None, offset: Sequence[int] | None = None
) -> Proof:
    """Prefill a span at two places and compare the moved KV with the one computed there."""
    span = encoded or _text(backbone, 12)
    step = tuple(offset) if offset is not None else _step(backbone, (37, 5, 11))
    base = backbone.positions([span.input_ids], [span.position_inputs])
    moved = base + torch.tensor(step)[:, None]
    try:
        here, _ = backbone.run(span, base)
        there, _ = backbone.run(span, moved)
    except NonFiniteKV as error:
        return Proof(math.inf, str(error), 0.0, step)
    return _compare(backbone, relocate_kv(here, backbone.layout, step), there, step)


def prove_patch(backbone: Backbone, offset: Sequence[int] | None = None) -> Proof:
    """Restore a conditioned prefill from the canonical and a full-rank patch, at a third place."""
    antecedent, span = _text(backbone, 10, seed=5), _text(backbone, 12)
    step = tuple(offset) if offset is not None else _step(backbone, (23, 3, 7))
    whole = backbone.positions([antecedent.input_ids, span.input_ids], [{}, {}])
    alone = backbone.positions([span.input_ids], [{}])
    a, b = whole[:, : antecedent.num_tokens], whole[:, antecedent.num_tokens :]
    canonical, _ = backbone.run(span, alone)
    _, cache = backbone.run(antecedent, a)
    conditioned, _ = backbone.run(span, b, cache)
    there = tuple(int(o) for o in (b - alone)[:, 0])
    patch = form_patch(conditioned, canonical, backbone.layout, there, None).patch
    # the whole sequence moved by one more step: the KV of a re-prefill there
    shift = torch.tensor(step)[:, None]
    _, cache = backbone.run(antecedent, a + shift)
    expected, _ = backbone.run(span, b + shift, cache)
    onward = tuple(x + y for x, y in zip(there, step, strict=True))
    served = apply_patch(canonical, patch, backbone.layout, onward)
    return _compare(backbone, served, expected, onward)


def _step(backbone: Backbone, wanted: tuple[int, int, int]) -> tuple[int, ...]:
    """An offset that stays below the model's position limit."""
    room = wanted[0] if backbone.limits.below is None else max(1, backbone.limits.below - 24)
    return tuple(min(w, room) for w in wanted[: backbone.axes])


def _compare(backbone: Backbone, got: KV, expected: KV, offset: tuple[int, ...]) -> Proof:
    precise = next(t.dtype for layer in got for t in layer.values()) in (
        torch.float32,
        torch.float64,
    )
    tolerance = 1e-4 if precise else 2e-2
    layers = range(len(got)) if precise else [i for i, layer in enumerate(got) if layer][:1]
    error, worst = 0.0, "none"
    for i in layers:
        for name, tensor in got[i].items():
            want = expected[i][name].double()
            e = float((tensor.double() - want).norm() / want.norm().clamp_min(1e-30))
            if not e <= error:  # also catches nan
                error, worst = e, f"layer {i} channel {name}"
    return Proof(error, worst, tolerance, offset)


def _text(backbone: Backbone, count: int, seed: int = 11) -> Encoded:
    size = backbone.model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(count) * 7919 + seed) % size
    media = {backbone.builder.image_token, backbone.builder.video_token}
    ids = torch.tensor([0 if int(i) in media else int(i) for i in ids])
    return Encoded(ids, {}, {})
