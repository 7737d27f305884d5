"""Agreement with the re-prefill, item by item, and the share of flipped answers that an arm restores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.certify.metrics import Items, bootstrap
from kamera.trust import Estimate


def agreement(arm: torch.Tensor, reference: torch.Tensor) -> Items:
    """1.0 if the arm's best token is re-prefill's, else 0.0, per row of logits ``[items, vocabulary]``."""
    same: Items = (arm.argmax(-1) == reference.argmax(-1)).double().cpu().numpy()
    return same


def flip_recover(arm: Sequence[float] | Items, blind: Sequence[float] | Items) -> Estimate:
    """Share of the re-prefill answers flipped by blind reuse that the arm restores.

    Both are `agreement` with re-prefill per item; nan if blind reuse flips none (paper, section 4).
    """
    return bootstrap([now for now, was in zip(arm, blind, strict=True) if was == 0.0])
