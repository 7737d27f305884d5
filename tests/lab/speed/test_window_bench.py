"""What the window benchmark says of its operations is what they do."""

from __future__ import annotations

import math

import pytest
import torch

from kamera.window import former_of, sequence_of
from lab.speed.forks import forks, storage_bytes
from lab.speed.moves import Deck
from lab.speed.stock import Stock
from lab.speed.timing import Measured, Spread
from lab.speed.window import prefill_of, run
from lab.speed.window import row as window_row
from tests.lab.speed.beds import SMALL, TOKENS, deck

KEYS = 2 * 2 * 16 * 2  # bytes a token: layers, heads, features, bf16
BOTH = 2 * KEYS


@pytest.fixture(scope="module")
def found():
    return {section.title: section.rows for section in run(SMALL).sections}


@pytest.mark.slow
def test_every_operation_has_a_row_and_runs_no_forward(found):
    rows = found["Window operations"]
    names = [m.name for m in deck(2).moves()]
    assert [(r["chunks"], r["operation"]) for r in rows] == [(c, n) for c in (2, 4) for n in names]
    assert {r["forwards"] for r in rows} == {0}


@pytest.mark.slow
def test_every_ratio_is_a_finite_number_above_zero(found):
    for row in found["Window operations"]:
        for name in ("ms", "times a copy", "with the next question"):
            spread = row[name]
            assert 0.0 < spread.low <= spread.median <= spread.high < math.inf, (row["operation"], name)
        assert 0.0 < row["times as fast as a re-prefill"] < math.inf


@pytest.mark.slow
def test_the_other_tables_cover_what_was_asked_for(found):
    assert [r["steps"] for r in found["Recall and slide, over and over"]] == [4, 8]
    shared, apart = found["64 forks"]
    assert shared["chunks"] == apart["chunks"] == 4
    assert [g["goal"] for g in found["Goals"]][-1].startswith("64 forks")
    assert all(isinstance(g["met"], bool) for g in found["Goals"])


def test_the_least_bytes_are_those_counted_by_hand():
    moved = {m.name: (m.moved, m.changed) for m in deck(6).moves()}
    assert moved == {
        "append, stored": (2 * TOKENS * BOTH, range(6, 7)),
        "recall": (2 * TOKENS * BOTH, range(6, 7)),
        "slide": (2 * 6 * TOKENS * KEYS, range(6)),
        "evict in the middle": (2 * 3 * TOKENS * BOTH, range(3, 6)),
        "reorder the tail": (2 * 4 * TOKENS * BOTH, range(2, 6)),
        "condition off": (2 * TOKENS * BOTH, range(3, 4)),
        "condition on": (2 * TOKENS * BOTH, range(3, 4)),
        "fork": (2 * 6 * TOKENS * BOTH, range(6)),
        "fork, then recall": (2 * TOKENS * BOTH, range(6, 7)),
    }


def test_a_ratio_is_taken_round_by_round_and_its_median_told():
    of = deck(2)
    move = next(m for m in of.moves() if m.name == "recall")
    asked = f"{move.name}, then a question"
    timed = Measured({"recall": (2.0, 30.0, 8.0), f"copy {move.moved}": (1.0, 10.0, 2.0)}, {})
    later = Measured({asked: (12.0, 14.0, 16.0), "question": (4.0, 4.0, 4.0)}, {})
    row = window_row(of, move, timed, later, prefill=16.0)
    assert row["times a copy"] == Spread.of([2.0, 3.0, 4.0])
    assert row["times as fast as a re-prefill"] == 2.0
    assert row["with the next question"] == Spread.of([3.0, 3.5, 4.0])
    assert row["put off ms"] == pytest.approx(1e3 * (14.0 - 4.0 - 8.0))


def test_a_re_prefill_grows_with_what_stands_before():
    assert prefill_of(range(1, 3), chunks=4, alone=1.0, full=3.0) == pytest.approx(1.5 + 2.0)


def test_moves_match_their_names_and_start_from_one_window():
    of = deck(4)
    for move in of.moves() * 2:
        of.ready(of.chunks + move.start)
        assert all(s.conditioned for s in of.window.slots)
        assert torch.equal(sequence_of(of.window).position_ids, fresh_positions(of))
        before = [s.chunk_id for s in of.window.slots]
        done = move.prepare(of)()
        after = [s.chunk_id for s in of.window.slots]
        expected = {
            "append, stored": (before, 5),
            "recall": (before, 5),
            "slide": (before[1:], 4),
            "evict in the middle": (before[:2] + before[3:], 4),
            "reorder the tail": (before[::-1], 4),
        }.get(move.name, (before, 4))
        assert (after[: len(expected[0])], len(after)) == expected, move.name
        if move.name in ("append, stored", "recall", "reorder the tail"):
            assert done.bytes_patched > 0
        if move.name == "fork, then recall":
            assert len(done) == 5
    assert of.forwards == 0


def fresh_positions(of: Deck) -> torch.Tensor:
    window = of.window
    chunks = {of.stock.chunk(i).id: of.stock.chunk(i) for i in range(10)}
    held = [chunks[s.chunk_id] for s in window.slots]
    anchor = former_of(window).anchor.input_ids
    return of.stock.backbone.positions(
        [anchor, *[c.input_ids for c in held]], [{}, *[c.position_inputs() for c in held]]
    )


class Patchless(Stock):
    """A stock that forgets to store patches."""

    def patch(self, chunk_id, antecedents):
        pass


def test_a_forward_that_should_not_be_is_counted():
    assert deck(3, Patchless).forwards > 0


def test_forks_share_their_tensors_until_they_diverge():
    shared, apart = forks(deck(4), count=8, diverged=2)
    assert shared["added MB"] == 0.0
    assert apart["added MB"] > 0.0
    assert apart["each % of the window"] == pytest.approx(apart["added % of the window"] / 2)


def test_a_storage_counts_once_however_many_windows_hold_it():
    of = deck(3)
    one = storage_bytes([of.window])
    assert one >= 3 * TOKENS * BOTH
    assert storage_bytes([of.window, of.window.fork(), of.window]) == one
    whole, apart = torch.zeros(10), torch.zeros(3)
    assert storage_bytes([[whole, whole[2:]], {"view": whole.view(2, 5)}, (apart,)]) == 13 * 4
    assert storage_bytes([[of.stock.backbone, of.stock.store]]) == 0
    other = deck(3)
    assert storage_bytes([of.window, other.window]) > one
