"""The laboratory's metrics against their definitions."""

import math

import pytest
import torch

from lab.metrics import agreement, flip_recover


def test_agreement_is_that_of_each_item_alone():
    generator = torch.Generator().manual_seed(0)
    arm, reference = (torch.randn(6, 9, generator=generator) for _ in range(2))
    pairs = zip(arm, reference, strict=True)
    assert agreement(arm, reference).tolist() == [float(a.argmax() == r.argmax()) for a, r in pairs]
    assert agreement(arm, arm).all()


def test_flip_recover_looks_only_at_items_that_blind_flips():
    blind = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert flip_recover([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], blind).mean == 0.75
    assert flip_recover(blind, blind).mean == 0.0
    assert math.isnan(flip_recover([0.0], [1.0]).mean)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        flip_recover([1.0, 1.0], blind)
