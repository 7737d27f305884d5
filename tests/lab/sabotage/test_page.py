"""The page shows what was measured."""

import copy

import pytest

from lab.sabotage.certificates import SOUND
from lab.sabotage.page import BEGIN, BUILDS_BEGIN, BUILDS_END, END, PAGE, beds, built, certified, measured

BEDS = beds()


def test_the_page_shows_the_committed_results():
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    assert BEDS and shown == measured(BEDS)


def test_a_passing_arm_is_named_where_it_passes():
    arms = BEDS[0]["seen"]
    bed = copy.deepcopy(BEDS[0]) | {"blind_to": ["random patch"]}
    bed["seen"] = {arm: {"bound": "decisions"} for arm in arms} | {"random patch": {}}
    text = measured([bed])
    assert "| random patch | **passes** |" in text and "*This bed is blind to: random patch.*" in text
    assert text.count("**passes**") == 1


@pytest.mark.parametrize("bed", BEDS, ids=[f"{bed['backbone']}-{bed['world']}" for bed in BEDS])
def test_every_setup_that_is_answered_asks_what_the_command_says(bed):
    for setup in bed["setups"]:
        assert setup["n"] >= bed["items"] or not setup["answered"] or setup["windows"] == 0
        assert {row["n"] for row in setup["rows"]} <= {setup["n"]}
        if setup["answered"]:
            sound = next(row for row in setup["rows"] if row["arm"] == "sound")
            assert sound["accuracy"][0] >= setup["reprefill"][0] - 0.05, "the sound arm passes"


def test_the_page_shows_the_committed_certificates_of_wrong_builds():
    shown = PAGE.read_text(encoding="utf-8").split(BUILDS_BEGIN)[1].split(BUILDS_END)[0].strip()
    assert shown == built(certified())
    assert {(one["backbone"], one["dtype"]) for one in certified()} >= {
        ("gqa", "float32"),
        ("mla", "float32"),
    }


@pytest.mark.parametrize("one", certified(), ids=lambda one: f"{one['backbone']}-{one['dtype']}")
def test_no_wrong_build_was_found_safe_and_the_sound_one_was(one):
    assert one["safe_of_wrong_builds"] == []
    wrong = {name: row for name, row in one["builds"].items() if name != SOUND}
    assert len(wrong) > 15
    assert {finding["verdict"] for row in wrong.values() for finding in row.values()} == {"unsafe"}
    assert one["builds"][SOUND]["patched"]["verdict"] == "safe"
    assert one["builds"][SOUND]["patched"]["n"] == one["items"]
