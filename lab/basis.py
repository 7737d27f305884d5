"""One right basis per layer and channel, pooled over many chunks' deficits (paper, section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from kamera.engines.hf import HfEngine
from lab.scene import Scene


@dataclass(frozen=True, eq=False)
class Basis:
    """Orthonormal directions of the canonical frame: per layer, channel -> ``[features, directions]``.

    Columns are ordered by the energy they carry over the scenes it was fitted on. Canonicals of one
    anchor begin at one position, so their deficits share a frame.
    """

    layers: tuple[Mapping[str, torch.Tensor], ...]
    fingerprint: str

    @classmethod
    def fit(cls, scenes: Iterable[Scene]) -> Basis:
        """Pool the deficits of ``scenes``, seen once each (they may be made on the way)."""
        grams: list[dict[str, torch.Tensor]] | None = None
        fingerprint = ""
        for scene in scenes:
            fingerprint = fingerprint or scene.backbone.fingerprint
            if fingerprint != scene.backbone.fingerprint:
                raise ValueError("scenes of two backbones have no basis in common: fit one per backbone")
            grown = [{name: _gram(d) for name, d in layer.items()} for layer in scene.delta]
            if grams is not None:
                grown = [
                    {name: old[name] + new[name] for name in new}
                    for old, new in zip(grams, grown, strict=True)
                ]
            grams = grown
        if grams is None:
            raise ValueError("a basis needs the deficit of at least one scene")
        return cls(tuple({n: _directions(g) for n, g in layer.items()} for layer in grams), fingerprint)

    @property
    def nbytes(self) -> int:
        """Bytes of all directions: stored once, whatever the number of chunks."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())

    def check(self, backbone: HfEngine) -> None:
        """Raise ValueError for a backbone it was not fitted on."""
        if backbone.fingerprint != self.fingerprint:
            raise ValueError(
                f"basis of backbone {self.fingerprint[:12]} used on {backbone.fingerprint[:12]}: "
                "fit one on this backbone"
            )


def _gram(delta: torch.Tensor) -> torch.Tensor:
    wide = delta.to(torch.float64)
    return wide.T @ wide


def _directions(gram: torch.Tensor) -> torch.Tensor:
    energies, vectors = torch.linalg.eigh(gram)
    carried = int((energies > 0).sum())
    return vectors.flip(1)[:, :carried].to(torch.float32)
