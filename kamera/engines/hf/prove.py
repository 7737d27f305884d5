"""Proofs on the live model, by the kernels that serve: a move equals a prefill, a patch restores one, and a
forward does not depend on how its tokens are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kamera.content import Encoded
from kamera.engines.base import Span
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import forwards
from kamera.engines.hf.contents import input_device
from kamera.engines.hf.hooks import foreign_hooks, hook_tables, unobserved
from kamera.engines.hf.live import LiveCache
from kamera.errors import KameraError, NonFiniteKV, first_line
from kamera.ops import KV, Patch, exact_kv, form_patch, kv_concat, kv_map, kv_tensors
from kamera.ops.kernels import serve

if TYPE_CHECKING:
    from kamera.engines.hf.engine import HfEngine


SPREAD = 8.0
"""Times the difference that rounding makes between two forwards, which a layer may be off by in half
precision. Rounding is seen in the layer's free channels, which no move turns."""

CHAOS = 0.5
"""Most that is granted to rounding. In a layer where two forwards differ by more (flipped expert choices),
they are no ground for a proof: it is left to `prove_moves`, which needs no second forward."""

_ROWS = 5e-3
"""Tolerance of one product of a row and a matrix in any dtype: in half precision it is rounded at 2^-8."""

_ROWS_HALF = 6e-2
"""Tolerance of logits in half precision: of several forwards' rounding, but below what a wrong mask does."""


def precision(dtype: torch.dtype) -> float:
    """Relative error that the last rounding to ``dtype`` explains, where all else was done in float32."""
    return max(1e-5, torch.finfo(dtype).eps / 8)


@dataclass(frozen=True)
class OperatorProof:
    """The relative L2 error of the layer and channel that uses up most of its tolerance, and that tolerance.

    Every layer counts, in every dtype. In float32 all are held to 1e-4. In half precision two forwards differ
    by rounding (and by flipped expert choices), the more the deeper; the first layer is held to two and a
    half roundings, a deeper one to what its free channels, which are only copied, differ by, times `SPREAD`.
    """

    error: float
    worst: str
    tolerance: float
    offset: tuple[int, ...]

    @property
    def holds(self) -> bool:
        """True when the error is within tolerance."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The used share of the tolerance; a NaN uses all of it."""
        return self.error / self.tolerance if self.error == self.error else math.inf


def prove_relocation(
    model: HfEngine, encoded: Encoded | None = None, offset: Sequence[int] | None = None
) -> OperatorProof:
    """Prefill a span at two places and compare the moved KV with the one computed there.

    It is moved by the serving kernels: written whole, and turned in place as a slide does it.
    """
    span = encoded or sample_text(model, 12)
    step = tuple(offset) if offset is not None else _safe_offset(model, (37, 5, 11))
    base = model.positions([span.input_ids], [span.position_inputs])
    moved_positions = base + torch.tensor(step)[:, None]
    try:
        base_kv, _ = forwards.run(model, span, base)
        moved_kv, _ = forwards.run(model, span, moved_positions)
    except NonFiniteKV as error:
        return OperatorProof(math.inf, str(error), 0.0, step)
    rounding = _layer_tolerances(model, base_kv, moved_kv)
    turned_kv = kv_map(base_kv, torch.clone)
    serve(turned_kv, base_kv, None, model.layout, step, phased_only=True)
    whole = _write_span(model, base_kv, None, step)
    return _worst(off for kv in (whole, turned_kv) for off in compare_kv(kv, moved_kv, step, rounding))


def prove_patch(model: HfEngine, offset: Sequence[int] | None = None) -> OperatorProof:
    """Restore a conditioned prefill from the canonical and a full-rank patch, at a third place."""
    antecedent, span = sample_text(model, 10, seed=5), sample_text(model, 12)
    step = tuple(offset) if offset is not None else _safe_offset(model, (23, 3, 7))
    whole = model.positions([antecedent.input_ids, span.input_ids], [{}, {}])
    canonical_positions = model.positions([span.input_ids], [{}])
    a, b = whole[:, : antecedent.num_tokens], whole[:, antecedent.num_tokens :]
    canonical, _ = forwards.run(model, span, canonical_positions)
    _, cache = forwards.run(model, antecedent, a)
    conditioned_kv, _ = forwards.run(model, span, b, cache)
    patch_offset = tuple(int(o) for o in (b - canonical_positions)[:, 0])
    patch = form_patch(conditioned_kv, canonical, model.layout, patch_offset, None).patch
    # the whole sequence moved by one more step: the KV of a re-prefill there
    shift = torch.tensor(step)[:, None]
    _, cache = forwards.run(model, antecedent, a + shift)
    reprefill, _ = forwards.run(model, span, b + shift, cache)
    far_offset = tuple(x + y for x, y in zip(patch_offset, step, strict=True))
    rounding = _layer_tolerances(model, conditioned_kv, reprefill)
    return _worst(
        compare_kv(_write_span(model, canonical, patch, far_offset), reprefill, far_offset, rounding)
    )


def prove_moves(model: HfEngine) -> OperatorProof:
    """Show spans in a live cache, exchange, drop and bring them back: each is what the slow reference says.

    Only the last rounding may differ, in every layer and every dtype.
    """
    layout, zero = model.layout, (0,) * model.axes
    texts = [sample_text(model, count, seed) for count, seed in ((10, 5), (12, 11), (7, 23))]
    kvs = [forwards.run(model, text, model.positions([text.input_ids], [{}]))[0] for text in texts]
    other, _ = forwards.run(model, texts[1], model.positions([texts[1].input_ids], [{}]) + 1)
    patch = form_patch(other, kvs[1], layout, zero, None).patch
    near, far = _safe_offset(model, (9, 9, 9)), _safe_offset(model, (31, 13, 17))
    first, last = Span(kvs[0], None, zero), Span(kvs[2], None, far)
    near_span, far_span = Span(kvs[1], patch, near), Span(kvs[1], patch, far)
    live, proofs = LiveCache(model), list[OperatorProof]()
    for spans in (
        (first, near_span, last),
        (near_span, last),  # the front leaves: the others stay or move
        (first, far_span, last),  # a span turns where it stands
        (first, last, far_span),
        (Span(kvs[2], None, near), first, near_span),  # the live cache is written anew
    ):
        live.show(spans)
        for index, span in enumerate(spans):
            proofs += compare_kv(live.read(index), exact_kv(span.kv, span.patch, layout, span.offset), far)
    return _worst(proofs)


def _write_span(model: HfEngine, source: KV, patch: Patch | None, offset: Sequence[int]) -> KV:
    """A span written whole by the serving kernels."""
    into = kv_map(source, torch.empty_like)
    serve(into, source, patch, model.layout, offset)
    return into


def prove_cuts(model: HfEngine) -> OperatorProof:
    """Run one text whole and in three pieces, and every kind of linear module on rows together and alone.

    Some forwards compute a number from all their tokens at once (a dynamic scale of activations, outliers
    chosen for a batch, a capacity shared by tokens). They give a chunk alone other KV than the same tokens in
    a whole prompt. Rows of different sizes show this in every part of the model and in any dtype. In half
    precision the text is compared in its first layer, because later layers differ by rounding alone. Raises
    NonFiniteKV for a model whose forward of the whole text overflows.
    """
    span = sample_text(model, 16)
    positions = model.positions([span.input_ids], [span.position_inputs])
    cuts = (0, 9, 15, 16)
    whole, _ = forwards.run(model, span, positions)
    try:
        cache, pieces = forwards.make_cache(model, []), []
        for start, stop in pairwise(cuts):
            piece = Encoded(span.input_ids[start:stop])
            kv, cache = forwards.run(model, piece, positions[:, start:stop], cache)
            pieces.append(kv_map(kv, torch.clone))
    except NonFiniteKV as error:
        return OperatorProof(math.inf, str(error), 0.0, cuts)
    proof = _worst(compare_kv(kv_concat(pieces), whole, cuts, _cut_tolerances(whole)))
    for name, module in _linear_kinds(model.model):
        row_error = _row_mixing_error(model, module)
        if not row_error <= max(proof.error, _ROWS):
            proof = OperatorProof(row_error, name, _ROWS, cuts)
    return proof


def _cut_tolerances(kv: KV) -> Sequence[float]:
    """By layer: in half precision the later ones differ by rounding alone, so the first one counts."""
    first = next((i for i, layer in enumerate(kv) if layer), 0)
    precise = all(t.dtype in (torch.float32, torch.float64) for t in kv_tensors(kv))
    return [1e-4 if precise else _ROWS if i == first else math.inf for i in range(len(kv))]


def why_no_reuse(cuts: OperatorProof, kind: str) -> str:
    """Why no KV of a model of this ``kind`` can be used again, by what `prove_cuts` found; "" if it can."""
    if cuts.holds:
        return ""
    return (
        f"the forward of this {kind} depends on how its tokens are cut (relative error {cuts.error:.1e} in "
        f"{cuts.worst}, tolerance {cuts.tolerance:.0e}), as it does where a scale of activations is read off "
        "all tokens at once: no KV of it can be used again; let ChatSession(uncached=True) or transformers "
        "run it, or quantise its weights alone"
    )


def why_no_rows(model: HfEngine) -> str:
    """Why answers of a model are decoded one after another; "" if they may be rows of one forward.

    Two texts of unlike length go on by a token each, alone and side by side.
    """
    kind = model.facts.kind
    if not model.quiet:
        return (
            f"a forward of this {kind} leaves state in the model: its answers are decoded one after another"
        )
    texts = [sample_text(model, count, seed) for count, seed in ((13, 5), (6, 23), (9, 11))]
    positions = [model.positions([text.input_ids], [{}]) for text in texts]
    ids = torch.stack([text.input_ids[-1:] for text in texts])
    last = torch.stack([places[:, -1:] for places in positions], dim=1)

    def pasts() -> list[Any]:
        prefixes = [Encoded(text.input_ids[:-1]) for text in texts]
        return [forwards.run(model, b, p[:, :-1])[1] for b, p in zip(prefixes, positions, strict=True)]

    try:
        with unobserved(foreign_hooks(hook_tables(model.model.modules()))):
            each = enumerate(pasts())
            singles = [forwards.next_logits(model, ids[i, None], last[:, i, None], past) for i, past in each]
            batch = forwards.next_logits(model, ids, last, model_cache.join_as_rows(pasts()))
    except (RuntimeError, ValueError, TypeError, IndexError, KameraError) as error:
        return f"this {kind} takes no rows of unlike length: {first_line(error)}"
    off = max(_relative(t, a[0]) for t, a in zip(batch, singles, strict=True))
    most = 1e-4 if model.dtype in (torch.float32, torch.float64) else _ROWS_HALF
    if off <= most:
        return ""
    return (
        f"a row of this {kind} depends on those beside it (relative error {off:.1e} of its logits, tolerance "
        f"{most:.0e}): its answers are decoded one after another"
    )


def _linear_kinds(model: nn.Module) -> list[tuple[str, Any]]:
    """One module of each kind that maps rows of features, with its name."""
    kinds: dict[Any, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features"):
            weight = getattr(module, "weight", None)
            kinds.setdefault((type(module), type(weight), getattr(weight, "dtype", None)), (name, module))
    return list(kinds.values())


def _row_mixing_error(model: HfEngine, module: Any) -> float:
    """Largest relative error of a row beside one a hundred times as large; 0 if the module takes no rows."""
    weight = getattr(module, "weight", None)
    weight = weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None
    device = input_device(model.model) if weight is None else weight.device
    dtype = model.dtype if weight is None else weight.dtype
    steps = torch.arange(3 * module.in_features, dtype=torch.float64).reshape(3, -1)
    rows = (torch.sin(steps * 1.7) * torch.tensor([[1.0], [100.0], [0.1]])).to(device, dtype)
    try:
        with torch.no_grad(), model.turns.alone():
            batch = module.forward(rows)
            singles = [module.forward(row[None])[0] for row in rows]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return 0.0  # a kind with arguments of its own
    errors = [
        (a.double() - t.double()).norm() / t.double().norm() for a, t in zip(singles, batch, strict=True)
    ]
    return float(max(errors))


def _safe_offset(model: HfEngine, offset: tuple[int, int, int]) -> tuple[int, ...]:
    """An offset that stays below the model's position limit."""
    room = offset[0] if model.limits.below is None else max(1, model.limits.below - 24)
    return tuple(min(w, room) for w in offset[: model.axes])


def _layer_tolerances(model: HfEngine, one: KV, other: KV) -> Sequence[float]:
    """By layer, the tolerance for two forwards of the same tokens."""
    tolerances = []
    for layer, other_layer, spec in zip(one, other, model.layout, strict=True):
        dtype = next((t.dtype for t in layer.values()), torch.float32)
        if dtype in (torch.float32, torch.float64):
            tolerances.append(1e-4)
            continue
        least, first = 2.5 * torch.finfo(dtype).eps, not tolerances
        free = [_relative(layer[c.name], other_layer[c.name]) for c in spec.channels if c.rope is None]
        allowance = SPREAD * max(free, default=0.0)
        tolerances.append(least if first else math.inf if allowance > CHAOS else max(least, allowance))
    return tolerances


def compare_kv(
    got: KV, expected: KV, offset: tuple[int, ...], tolerances: Sequence[float] | None = None
) -> Iterator[OperatorProof]:
    """Each layer and channel under the tolerance of its layer; None: what the last rounding explains."""
    for i, (layer, want) in enumerate(zip(got, expected, strict=True)):
        for name, tensor in want.items():
            most = precision(layer[name].dtype) if tolerances is None else tolerances[i]
            yield OperatorProof(_relative(layer[name], tensor), f"layer {i} channel {name}", most, offset)


def _relative(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    target = reference.double()
    return float((tensor.double() - target).norm() / target.norm().clamp_min(1e-30))


def _worst(proofs: Iterable[OperatorProof]) -> OperatorProof:
    return max(proofs, key=attrgetter("share"))


def sample_text(model: HfEngine, count: int, seed: int = 11) -> Encoded:
    """A text of ``count`` tokens, none of which stands for media."""
    ids = (torch.arange(count) * 7919 + seed) % model.builder.token_count
    ids = torch.tensor([0 if int(i) in model.builder.vision_tokens else int(i) for i in ids])
    return Encoded(ids)
