"""The headline, on the shipped backbone: what reuse loses, and that a small patch brings it back."""

from types import SimpleNamespace

import pytest
import torch

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.fidelity import Fidelity, measure
from lab.scorer import OneTokenQuestion, Scorer


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


def misses(table: Fidelity, n: int) -> list[str]:
    """The expectations that a table of at least ``n`` questions a row does not meet."""
    rows = {(s.operation, s.kind, s.arm): s for s in table.scores}
    patch = f"patch, rank {table.rank}"
    expected: dict[str, bool] = {}
    for operation in ("recall", "reorder", "turnover"):
        ideal, blind, kamera = (
            rows[(operation, "two-hop", arm)] for arm in ("re-prefill", "blind reuse", patch)
        )
        single = rows[(operation, "one-hop in the frame", "blind reuse")]
        expected |= {
            f"{operation}: questions": kamera.n >= n,
            f"{operation}: the re-prefill is right": ideal.accuracy.mean >= 0.95 - 1.0 / n,
            f"{operation}: blind reuse is not": blind.accuracy.mean <= 0.25,  # chance is 1/16
            f"{operation}: the patch is": kamera.accuracy.mean >= ideal.accuracy.mean - 0.01 - 1.0 / n,
            f"{operation}: the patch's η": kamera.eta >= 0.99,
            # what is read out of the frame itself survives
            f"{operation}: one hop": single.accuracy.mean >= 0.95,
        }
    stale, fresh = (rows[("turnover", "two-hop", arm)] for arm in ("stale patch", patch))
    expected["a stale patch is wrong"] = stale.accuracy.mean < fresh.accuracy.mean - 0.2
    expected["a stale patch's η"] = stale.eta < fresh.eta
    return [name for name, met in expected.items() if not met]


@pytest.mark.slow
def test_the_patch_restores_the_loss_of_recall_and_reorder(backbone):
    *_, table = measure(backbone, items=12, per_episode=12, seed=1)
    assert misses(table, 12) == []


@pytest.mark.slow
def test_patch_restores_what_blind_reuse_loses_on_500_items(backbone):
    *_, table = measure(backbone, items=500, rank=16)
    assert misses(table, 500) == []


def test_scorer_counts_accuracy_agreement_and_recovered_flips():
    def one_hot(token):
        return torch.nn.functional.one_hot(torch.tensor(token), 4).float() * 9

    words = {"a": torch.tensor([0]), "b": torch.tensor([1])}
    scorer = Scorer(SimpleNamespace(builder=SimpleNamespace(tokenize=words.__getitem__)))
    items = [OneTokenQuestion("q1", "a", "two-hop"), OneTokenQuestion("q2", "b", "two-hop")]
    arms = {
        "re-prefill": [one_hot(0), one_hot(1)],
        "blind reuse": [one_hot(2), one_hot(1)],  # flips the first item
        "patch": [one_hot(0), one_hot(3)],  # recovers it, and breaks the second
    }
    scorer.add("recall", items, arms)
    rows = {row.arm: row for row in scorer.scores()}
    assert [rows[a].accuracy.mean for a in arms] == [1.0, 0.5, 0.5]
    assert rows["patch"].flip_recover == 1.0
    assert rows["blind reuse"].flip_recover == 0.0
    assert rows["patch"].agreement == 0.5
    assert rows["re-prefill"].eta == 1.0 and rows["blind reuse"].eta == 0.0
