"""The command that measures fidelity: its arms, its windows, and that a broken operator shows in it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import intervals, texts
from benchmarks.fidelity import sliding
from benchmarks.fidelity.__main__ import measure_arms, measure_sliding, sliding_rows
from benchmarks.fidelity.reader import Reader
from kamera import Backbone
from tests.models import talkers, tiny

WORDS = ["alder", "birch", "cedar", "dogwood", "elder", "fir", "ginkgo", "hazel", "iris", "juniper"]


def document(count: int, name: str = "trees") -> texts.Document:
    """Passages of 24 to 26 letters, which are tokens here."""
    return texts.Document(name, tuple(f"{name}.{w}: {w} {w[::-1]}"[:24] for w in (WORDS * 2)[:count]))


def reader(sabotage: str = "") -> Reader:
    return Reader(Backbone(tiny.build("llama_mqa"), talkers.tokenizer()), sabotage)


@pytest.fixture(scope="module")
def arms() -> dict[str, dict]:
    others = [document(6, name) for name in ("bees", "cats", "dogs", "eels")]
    return {row["arm"]: row for row in measure_arms(reader(), document(6), "own", others)}


def test_a_patch_of_full_rank_is_the_re_prefill_and_blind_reuse_is_not(arms):
    assert arms["patch, rank 32"]["kl text"] < 1e-6 < 1e-4 < arms["blind"]["kl text"]
    assert arms["patch, rank 32, all"]["kl answer"] < 1e-6 < 1e-4 < arms["blind, all"]["kl answer"]
    assert arms["patch, rank 32"]["kl text"] < arms["patch, rank 4"]["kl text"] < arms["blind"]["kl text"]


def test_a_patch_takes_the_bytes_that_it_was_given(arms):
    assert 0 < arms["patch, 12% of bytes"]["size"] <= 0.12
    assert 0 < arms["patch, 25% of bytes"]["size"] <= 0.25


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sabotage", "suffers", "stays"),
    [
        ("no-rotation", "survivors behind an exact lead", None),
        ("foreign-patch", "patch, rank 32, all", "survivors, all"),
    ],
)
def test_a_broken_operator_shows(arms, sabotage, suffers, stays):
    others = [document(6, name) for name in ("bees", "cats", "dogs", "eels")]
    broken = {row["arm"]: row for row in measure_arms(reader(sabotage), document(6), "own", others)}
    assert broken[suffers]["kl text"] > 5 * max(1e-6, arms[suffers]["kl text"])
    if stays is not None:
        assert broken[stays]["kl text"] == pytest.approx(arms[stays]["kl text"], rel=1e-3)


def test_windows_in_steady_state_and_the_tokens_that_they_run():
    rows = measure_sliding(reader(), document(13), "sliding")
    two, three = ({row["arm"]: row for row in sliding_rows(rows, "sliding", n)} for n in (2, 3))
    for exact in (two["predecessor above 1/2"], three["two predecessors mixed"]):
        assert exact["kl"].mean < 1e-6 < 1e-5 < two["rotation alone"]["kl"].mean
    assert three["rotation alone"]["kl"].mean > three["lead exact"]["kl"].mean
    assert [three[keep.name]["background"] for keep in sliding.KEEPS] == [0.0, 1.0, 2.0, 2.0, 3.0]
    assert {three[keep.name]["now"] for keep in sliding.KEEPS} == {1.0}
    assert three["lead exact"]["prefix"] == pytest.approx(4.0, rel=0.05)  # three that stay, and the new one


def test_a_slot_says_what_has_departed_and_is_formed_again():
    chunks = [torch.arange(10) + 3 for _ in range(9)]
    keeps = (sliding.Keep("lead"), sliding.Keep("again", again=0.5))
    passages = sliding.Passages(reader(), chunks)
    made = {window.name: window.departed for window in sliding.windows(passages, 4, keeps)}
    assert made["lead"] == (1.0, 0.75, 0.5, 0.25)
    assert max(made["again"][1:]) <= 0.5


def test_documents_are_the_same_every_time_and_of_bounded_passages():
    made = [texts.documents(5, str.split, passages=4, longest=120) for _ in range(2)]
    assert made[0] == made[1] and texts.digest(made[0]) == texts.digest(made[1])
    assert len({d.name.partition(".")[0] for d in made[0]}) > 2
    assert all(texts.SHORTEST <= len(p.split()) <= 120 for d in made[0] for p in d.passages)


def test_intervals_are_those_of_documents():
    assert intervals.eta([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (0.0, 0.0, 0.0)
    made = intervals.eta([1.0, 3.0], [2.0, 6.0])
    assert made == (0.5, 0.5, 0.5)
    wide = intervals.mean([0.0, 1.0] * 50)
    assert wide.mean == 0.5 and 0.38 < wide.low < 0.42 and 0.58 < wide.high < 0.62
    assert intervals.restored([1, 1], [2, 2]).mean == 0.5
