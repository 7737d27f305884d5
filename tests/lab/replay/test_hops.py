"""Questions that cross an edit tell what an arm's KV still knows, and see a sabotaged patch."""

from __future__ import annotations

from itertools import islice

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.testbed.world import answer
from lab.replay.__main__ import table
from lab.replay.hops import ARMS, EDITS, crossed, hops


@pytest.fixture(scope="module")
def found():
    return crossed(HfEngine(*testbed.load()), "gqa", 2, 0)


def test_every_answer_changes_with_the_edit():
    for hop in islice(hops("gqa", 1), 6):
        episode = testbed.world.Episode(hop.before, 0)
        asked = {q.text: q for q in episode.questions}
        assert len(hop.after) == len(hop.before) - (hop.edit == "removed")
        for text, after in hop.questions:
            assert answer(hop.after, asked[text]) == after != asked[text].answer


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_exact_and_repair_answer_as_no_cache_does(found, edit):
    arms = found[edit]
    assert set(arms) == {"no cache", *ARMS} and arms["no cache"]["n"] >= 2
    for arm in ("exact", "repair", "repair, stored"):
        assert arms[arm]["answers as re-prefill"] == 1.0 and arms[arm]["KL to re-prefill"] < 0.01
    assert arms["amortize"]["KL to re-prefill"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_anothers_patches_are_seen(found, edit):
    told = found[edit]["sabotage: another's patches"]
    assert told["answers as re-prefill"] < 0.5 and told["KL to re-prefill"] > 1.0


@pytest.mark.slow
def test_the_table_has_a_row_for_each_edit_and_arm(found):
    text = table({"command": "c", "commit": "d", "machine": {}, "hops": found})
    assert text.count("| removed |") == text.count("| moved |") == len(ARMS) + 1
