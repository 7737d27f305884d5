"""Metrics against their definitions, written out."""

import math

import numpy as np
import pytest
import torch

from kamera.certify.metrics import bootstrap, eta, eta_interval, kl


def test_kl_is_the_sum_written_out_and_zero_for_equal_logits():
    arm, reference = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 0.0])
    p, q = torch.softmax(arm, -1).tolist(), torch.softmax(reference, -1).tolist()
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    there, back = (float(kl(*pair)) for pair in ((arm, reference), (reference, arm)))
    assert there == pytest.approx(expected, rel=1e-6) and there != pytest.approx(back)
    rows = kl(torch.stack([arm, arm]), torch.stack([reference, arm + 3.0]))
    assert rows.tolist() == pytest.approx([expected, 0.0], abs=1e-6)


def test_eta_closes_the_gap_at_one_and_is_negative_when_harmful():
    assert eta([0.0, 0.0], [2.0, 4.0]) == 1.0
    assert eta([2.0, 4.0], [2.0, 4.0]) == 0.0
    assert eta([6.0, 6.0], [2.0, 4.0]) == -1.0
    assert math.isnan(eta([0.0], [0.0]))


def test_bootstrap_holds_the_mean_and_narrows_with_items():
    rng = np.random.default_rng(0)
    few, many = (bootstrap(rng.integers(2, size=n).tolist()) for n in (20, 2000))
    for interval in (few, many):
        assert interval.low <= interval.mean <= interval.high
    assert many.high - many.low < few.high - few.low
    assert bootstrap([1.0] * 9) == bootstrap([1.0] * 5)


def test_eta_interval_draws_arm_and_blind_of_an_item_together():
    rng = np.random.default_rng(1)
    blind = rng.exponential(2.0, size=300)
    half = eta_interval(0.5 * blind, blind)  # every item closes half: no draw can differ
    assert half.low == pytest.approx(0.5) and half.high == pytest.approx(0.5)
    noisy = eta_interval(rng.permutation(blind), blind)
    assert noisy.low < noisy.mean < noisy.high
    assert noisy.mean == pytest.approx(0.0)  # the same losses on other items close nothing
    assert math.isnan(eta_interval([0.0, 1.0], [0.0, 0.0]).mean)
    with pytest.raises(ValueError, match="2 items of the arm and 3"):
        eta_interval([1.0, 1.0], blind[:3])
