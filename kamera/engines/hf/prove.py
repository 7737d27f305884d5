"""Numeric proofs on the live model: relocation and cuts are exact, a full-rank patch restores a prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kamera.content import Encoded
from kamera.errors import NonFiniteKV
from kamera.ops import KV, apply_patch, form_patch, kv_concat, kv_map, relocate_kv

if TYPE_CHECKING:
    from kamera.engines.hf.backbone import Backbone


_ROWS = 5e-3
"""Tolerance of one product of a row and a matrix in any dtype: in half precision it is rounded at 2^-8."""


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


def prove_cuts(backbone: Backbone) -> Proof:
    """Run one text whole and in three pieces, and every kind of linear module on rows together and alone.

    A forward that reads a number off all its tokens at once (a dynamic scale of activations, outliers chosen
    for a batch, a capacity shared by tokens) gives a chunk other KV than the same tokens in a whole prompt.
    Rows of unlike size show that in every part of the model and in any dtype; in half precision the text,
    whose later layers differ by rounding alone, is compared in its first layer.
    """
    span = _text(backbone, 16)
    positions = backbone.positions([span.input_ids], [span.position_inputs])
    cuts = (0, 9, 15, 16)
    try:
        whole, _ = backbone.run(span, positions)
        cache, pieces = backbone.cache([]), []
        for start, stop in pairwise(cuts):
            piece = Encoded(span.input_ids[start:stop], {}, {})
            kv, cache = backbone.run(piece, positions[:, start:stop], cache)
            pieces.append(kv_map(kv, torch.clone))
    except NonFiniteKV as error:
        return Proof(math.inf, str(error), 0.0, cuts)
    proof = _compare(backbone, kv_concat(pieces), whole, cuts, half=_ROWS)
    for name, module in _linear_kinds(backbone.model):
        apart = _apart_by_rows(backbone, module)
        if not apart <= max(proof.error, _ROWS):
            proof = Proof(apart, name, _ROWS, cuts)
    return proof


def without_reuse(cuts: Proof, kind: str) -> str:
    """Why no KV of a model of this ``kind`` can be used again, by what `prove_cuts` found; "" if it can."""
    if cuts.holds:
        return ""
    return (
        f"the forward of this {kind} depends on how its tokens are cut (relative error {cuts.error:.1e} in "
        f"{cuts.worst}, tolerance {cuts.tolerance:.0e}), as it does where a scale of activations is read off "
        "all tokens at once: no KV of it can be used again; let ChatSession(uncached=True) or transformers "
        "run it, or quantise its weights alone"
    )


def _linear_kinds(model: nn.Module) -> list[tuple[str, Any]]:
    """One module of each kind that maps rows of features, with its name."""
    kinds: dict[Any, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features"):
            weight = getattr(module, "weight", None)
            kinds.setdefault((type(module), type(weight), getattr(weight, "dtype", None)), (name, module))
    return list(kinds.values())


def _apart_by_rows(backbone: Backbone, module: Any) -> float:
    """Largest relative error of a row beside one a hundred times as large; 0 if the module takes no rows."""
    weight = getattr(module, "weight", None)
    weight = weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None
    device = backbone.device if weight is None else weight.device
    dtype = backbone.dtype if weight is None else weight.dtype
    steps = torch.arange(3 * module.in_features, dtype=torch.float64).reshape(3, -1)
    rows = (torch.sin(steps * 1.7) * torch.tensor([[1.0], [100.0], [0.1]])).to(device, dtype)
    try:
        with torch.no_grad(), backbone.alone():
            together = module.forward(rows)
            alone = [module.forward(row[None])[0] for row in rows]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return 0.0  # a kind with arguments of its own
    errors = [
        (a.double() - t.double()).norm() / t.double().norm() for a, t in zip(alone, together, strict=True)
    ]
    return float(max(errors))


def _step(backbone: Backbone, wanted: tuple[int, int, int]) -> tuple[int, ...]:
    """An offset that stays below the model's position limit."""
    room = wanted[0] if backbone.limits.below is None else max(1, backbone.limits.below - 24)
    return tuple(min(w, room) for w in wanted[: backbone.axes])


def _compare(backbone: Backbone, got: KV, expected: KV, offset: tuple[int, ...], half: float = 2e-2) -> Proof:
    precise = next(t.dtype for layer in got for t in layer.values()) in (
        torch.float32,
        torch.float64,
    )
    tolerance = 1e-4 if precise else half
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
