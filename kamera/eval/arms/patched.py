"""Arms with patches that were prepared for the asked window: right ones, noise, and another unit's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.eval.arms.plain import Blind
from kamera.eval.desk import Desk
from kamera.ops import LowRank, Patch, floats, form_patch


class Patched(Blind):
    """Canonicals with the patches of one window, formed when it is placed for the first time (rehearsed)."""

    rehearsed = True

    def __init__(self, desk: Desk, rank: int) -> None:
        super().__init__(desk)
        self.rank = rank
        self._patches: dict[str, Patch | None] = {}

    def place(self, order: Sequence[str]) -> None:
        """The first window is prepared. Others are patched if they are that window, and else wait: they were
        not prepared, and nobody asks about them."""
        if not self._patches:
            key = ("patches", self.rank, *order)
            if key not in self.desk.prepared:
                self.desk.prepared[key] = self._form(order)
            self._patches = self.desk.prepared[key]
        self.order, self.recomputed, self.forwards = tuple(order), 0.0, 0
        self.shown = self.spans(self.order) if self.order == tuple(self._patches) else None

    def patch_at(self, index: int) -> Patch | None:
        """The patch of the unit at ``index`` of the prepared window; None for the first, which needs none,
        and for live ones."""
        return self._patches[self.order[index]]

    def _form(self, order: Sequence[str]) -> dict[str, Patch | None]:
        shown = self.extend(order, [])
        layout, formed = self.desk.backbone.layout, dict[str, Patch | None]()
        for name, span, positions in zip(order, shown, self.desk.places(order), strict=True):
            patch = None
            if formed and not self.desk.units[name].live:
                canonical = self.desk.canonical(name)
                offset = self.desk.offset(name, canonical, positions)
                patch = form_patch(span.kv, canonical.kv, layout, offset, self.rank).patch
            formed[name] = patch
        return formed


class RandomPatched(Patched):
    """`Patched`, with noise of each factor's norm in place of the patch."""

    def patch_at(self, index: int) -> Patch | None:
        """Noise, equal for equal places."""
        true = super().patch_at(index)
        return None if true is None else _random_like(true, index)


class OtherPatched(Patched):
    """`Patched`, with the patch that another unit of the window has; rows repeat where it is shorter."""

    def patch_at(self, index: int) -> Patch | None:
        """That of the next unit; of the second one for the last."""
        true = super().patch_at(index)
        other = super().patch_at(index + 1 if index + 1 < len(self.order) else 1)
        return None if true is None or other is None else _fit_rows(other, true)


def _fit_rows(patch: Patch, to: Patch) -> Patch:
    """``patch`` with as many tokens as ``to``: its rows repeat from the first when they run out."""
    layers = []
    for layer, model in zip(patch.layers, to.layers, strict=True):
        fitted = {}
        for name in layer.keys() & model.keys():
            left, tokens = floats(layer[name].left), model[name].left.shape[0]
            fitted[name] = LowRank(left[torch.arange(tokens) % left.shape[0]], layer[name].right)
        layers.append(fitted)
    return Patch.of(tuple(layers))


def _random_like(patch: Patch, seed: int) -> Patch:
    """A random patch of the same rank and norm, layer by layer and channel by channel."""
    drawn = torch.Generator().manual_seed(seed)
    layers = ({name: _noise(low, drawn) for name, low in layer.items()} for layer in patch.layers)
    return Patch.of(tuple(layers))


def _noise(factors: LowRank, drawn: torch.Generator) -> LowRank:
    true = factors.dense()
    left, right = (torch.randn(n, factors.rank, generator=drawn, dtype=torch.float32) for n in true.shape)
    scale = float(true.float().norm()) / float((left @ right.T).norm())
    return LowRank((left * scale).to(true.device), right.to(true.device))
