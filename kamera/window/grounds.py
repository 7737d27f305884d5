"""The grounds of a certificate, read from a live engine."""

from __future__ import annotations

from kamera.engines import Engine
from kamera.ops import PatchBudget
from kamera.window.certificate import Grounds


def grounds_of(backbone: Engine, budget: PatchBudget) -> Grounds:
    """The grounds of a measurement of ``backbone`` with patches of ``budget``."""
    limits = backbone.limits
    ends = [end for end in (limits.trained, limits.below) if end is not None]
    last = min(ends) if ends else None
    return Grounds(backbone.fingerprint, backbone.named.dtype, backbone.vocabulary, last, budget)
