"""Kamera's own arms: patches of the deficit, by where they were formed and what they may store.

`patch`, `best`, `orbit`, `transfer` and `deep-half` need nothing but a budget and are known by name; the
others are told about a past the scene does not have, or a basis fitted elsewhere, when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kamera.content import Chunk
from kamera.ops import LowRank, Patch, compress, deficit, floats, kv_of, patch_of
from lab.arms import Served, register_budgeted
from lab.basis import Basis
from lab.scene import Scene


def _patched(scene: Scene, patch: Patch) -> Served:
    return Served(scene.patched(patch), patch.nbytes)


@dataclass(frozen=True)
class _AtRank:
    """What arms ``name@rank`` have in common."""

    rank: int
    kind = "patch"
    per_question = False

    @property
    def name(self) -> str:
        """``kind@rank``."""
        return f"{self.kind}@{self.rank}"


@dataclass(frozen=True)
class PlainPatch(_AtRank):
    """The best rank-``rank`` patch, formed behind these antecedents in this order."""

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus truncated Δ."""
        return _patched(scene, scene.patch.truncate(self.rank))


@dataclass(frozen=True)
class BestPatch(_AtRank):
    """The patch `compress` makes of the same bytes: spread over layers and channels, in few bits."""

    kind = "best"
    coded = True  # integers: its bytes are the same behind a cache of any dtype

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus what the budget buys of Δ."""
        return _patched(scene, compress(scene.delta, scene.layout, scene.budget(self.rank)).patch)


@dataclass(frozen=True)
class OrbitPatch(_AtRank):
    """One patch for every ordering: the mean Δ of the *other* orderings, this one held out."""

    kind = "orbit"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus truncated mean Δ. Raises ValueError where there is no other ordering."""
        return _patched(scene, scene.orbit.truncate(self.rank))


@dataclass(frozen=True)
class TransferPatch(_AtRank):
    """The patch of another ordering of the same antecedents: ``order``, or the reverse of this one."""

    order: tuple[int, ...] | None = None
    kind = "transfer"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus the other ordering's truncated Δ."""
        order = self.order or tuple(reversed(range(len(scene.antecedents))))
        return _patched(scene, scene.reordered(order).patch.truncate(self.rank))


@dataclass(frozen=True)
class NearPatch(_AtRank):
    """The patch formed behind ``before`` instead of the scene's antecedents: what `near` serves."""

    before: Sequence[Chunk]
    kind = "near"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus the truncated Δ of ``before``."""
        return _patched(scene, scene.behind(self.before).patch.truncate(self.rank))


@dataclass(frozen=True)
class StalePatch(_AtRank):
    """A patch from before the turnover: the first antecedents were ``replaced`` ones when it was formed."""

    replaced: Sequence[Chunk]
    kind = "stale"

    @property
    def name(self) -> str:
        """``stale@rank/turnover``, the turnover in chunks."""
        return f"stale@{self.rank}/{len(self.replaced)}"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus the truncated Δ of the set before the turnover."""
        turned = len(self.replaced)
        if turned > len(scene.antecedents):
            raise ValueError(f"{turned} chunks replaced of {len(scene.antecedents)} antecedents: give fewer")
        before = (*self.replaced, *scene.antecedents[turned:])
        return _patched(scene, scene.behind(before).patch.truncate(self.rank))


@dataclass(frozen=True)
class DeepHalf(_AtRank):
    """The plain patch on the deeper half of the layers only (rounded down): half the bytes."""

    kind = "deep-half"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical, and in deep layers truncated Δ."""
        patch = scene.patch.truncate(self.rank)
        first = (len(patch.layers) + 1) // 2
        deep = [{} if i < first else factors for i, factors in enumerate(patch.layers)]
        return _patched(scene, Patch.of(deep, patch.groups))


@dataclass(frozen=True)
class SharedBasis(_AtRank):
    """Coefficients in a basis all chunks share: stored per chunk is only the left factor.

    Each channel spends the bytes of a plain rank-``rank`` patch on more coefficients. The basis itself
    is not counted: it is stored once per model (`Basis.nbytes`).
    """

    basis: Basis = field(repr=False)
    kind = "shared-basis"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus Δ projected on the basis."""
        self.basis.check(scene.backbone)
        tokens = scene.target.num_tokens
        layers: list[dict[str, LowRank]] = []
        stored = 0
        for deltas, basis in zip(scene.delta, self.basis.layers, strict=True):
            factors = {}
            for name, delta in deltas.items():
                features = delta.shape[1]
                afforded = min(self.rank, tokens, features) * (tokens + features) // tokens
                right = basis[name][:, :afforded].to(scene.dtype)
                left = (delta @ right.to(delta)).to(scene.dtype)
                stored += left.numel() * left.element_size()
                factors[name] = LowRank(left, right)
            layers.append(factors)
        return Served(scene.patched(Patch.of(layers, scene.delta.groups)), stored)


@dataclass(frozen=True)
class Keep:
    """A survivor kept as it is: KV(B|``before``), turned to its place now that a chunk has left.

    A survivor is no canonical, so all of it counts as stored.
    """

    before: Sequence[Chunk]
    name = "keep"
    per_question = False

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """R(δ)·KV(B|before)."""
        was = scene.behind(self.before)
        kv = scene.operator(was.conditioned, None, scene.layout, scene.offset_from(was.positions))
        return Served(kv, scene.chunk_bytes)


@dataclass(frozen=True)
class RemovalPatch(_AtRank):
    """A survivor of ``before`` with a rank-``rank`` patch that takes out what has left.

    Formed from the difference to a re-prefill, in the survivor's own frame. The survivor counts as
    stored, like in `Keep`, and the patch on top of it.
    """

    before: Sequence[Chunk]
    kind = "removal"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Survivor plus truncated KV(B|A) − KV(B|before)."""
        was = scene.behind(self.before)
        offset = scene.offset_from(was.positions)
        change = deficit(scene.conditioned, was.conditioned, scene.layout, offset)
        patch = patch_of(change, self.rank, scene.dtype).patch
        kv = scene.operator(was.conditioned, patch, scene.layout, offset)
        return Served(kv, scene.chunk_bytes + patch.nbytes)


@dataclass(frozen=True)
class UpdatedPatch(_AtRank):
    """The rank-``old_rank`` patch of ``before``, refreshed by rank ``rank`` after the set has changed.

    ``rank`` bounds the refresh; both count as stored.
    """

    before: Sequence[Chunk]
    old_rank: int
    kind = "update"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Canonical plus old patch plus truncated (Δ − old patch)."""
        old = scene.behind(self.before).patch.truncate(self.old_rank)
        missing = [
            {n: d - held[n].dense() if n in held else d for n, d in deltas.items()}
            for deltas, held in zip(scene.delta, old.layers, strict=True)
        ]
        refresh = patch_of(kv_of(missing, scene.delta.groups), self.rank, scene.dtype).patch
        return _patched(scene, _sum(old, refresh))


def _sum(first: Patch, second: Patch) -> Patch:
    """Both corrections: factors side by side, not ordered by energy across the two."""
    layers = []
    for a, b in zip(first.layers, second.layers, strict=True):
        layer = {**a, **b}
        for name in set(a) & set(b):
            pair = (a[name], b[name])
            left = torch.cat([floats(f.left) for f in pair], dim=1)
            layer[name] = LowRank(left, torch.cat([floats(f.right) for f in pair], dim=1))
        layers.append(layer)
    return Patch.of(layers, first.groups)


register_budgeted("patch", PlainPatch)
register_budgeted("best", BestPatch)
register_budgeted("orbit", OrbitPatch)
register_budgeted("transfer", TransferPatch)
register_budgeted("deep-half", DeepHalf)
