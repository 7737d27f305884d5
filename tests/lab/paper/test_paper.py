"""``python -m lab.paper``, from the command line to the page, on one family and a few questions."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.paper import frontier, own
from lab.paper.__main__ import main
from lab.paper.document import View, commit
from lab.paper.plots import FIGURES
from lab.paper.report import render
from lab.paper.run import TABLES
from lab.paper.sections import INTRODUCTION as OF_THE_TESTBED
from lab.paper.sections import SECTIONS
from lab.paper.tally import ONE
from lab.paper.verdicts import CLAIMS, disagreements
from tests.cli.run import run

ITEMS = 6


class Made(NamedTuple):
    folder: Path
    printed: dict[str, Any]
    view: View


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("paper") / "results"
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = main(f"--families gqa --items {ITEMS} --output {folder} --format json -q".split())
    assert code == 0
    printed = json.loads(stdout.getvalue())
    return Made(folder, printed, View("gqa", printed["families"]["gqa"]))


def eta(made: Made, arm: str, **setting: int) -> float:
    return made.view.mean(frontier.NAME, arm, "eta", **setting)


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.slow
def test_file_and_output_are_one_document_with_its_provenance(made):
    assert json.loads((made.folder / "paper.json").read_text()) == made.printed
    assert made.printed["command"] == f"python -m lab.paper --families gqa --items {ITEMS} --seed 0 --jobs 1"
    assert made.printed["versions"]["torch"] and made.printed["machine"]["cores"]
    assert made.printed["seconds"] > 0 and made.printed["commit"]


@pytest.mark.slow
def test_every_table_has_enough_questions_for_every_arm(made):
    rows = made.view.family["rows"]
    for table in TABLES:
        counts = [r["n"] for r in rows if r["section"] == table and r["kind"] == "multi-hop"]
        assert counts and min(counts) >= ITEMS, table


@pytest.mark.slow
def test_some_tables_alone_have_a_page_of_their_own(made):
    page = own.page(made.printed, [])
    assert "the world of the testbed" in page and OF_THE_TESTBED in page
    assert f"## {frontier.NAME}, gqa" in page
    (rows, *_) = own.tables(made.printed)
    assert rows.row_count == sum(row["kind"] == "multi-hop" for row in made.view.family["rows"])


@pytest.mark.slow
def test_the_page_has_every_section_and_every_plot(made):
    page = (made.folder / "paper.md").read_text()
    for heading in ("disagree with the paper", "## 1. ", "## 2. ", *(s.title for s in SECTIONS)):
        assert heading in page
    for name in FIGURES:
        assert f"({name}.png)" in page
        assert 0 < (made.folder / f"{name}.png").stat().st_size < 150_000


@pytest.mark.slow
def test_numbers_of_the_page_are_the_documents(made):
    assert render(made.printed, [f"{n}.png" for n in FIGURES]) == (made.folder / "paper.md").read_text()
    for name, shown in ((frontier.NAME, "eta"), *((s.name, s.shows) for s in SECTIONS)):
        other, row = changed(made.printed, name)
        row[shown] = [0.123456, 0.012345, 0.912345]
        assert "0.123 [0.012, 0.912]" in render(other, []), name


def changed(document: Mapping[str, Any], section: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of the document, and one of its rows to write in."""
    other = copy.deepcopy(dict(document))
    rows = other["families"]["gqa"]["rows"]
    return other, next(r for r in rows if r["section"] == section and r["kind"] == "multi-hop")


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.slow
def test_blind_reuse_loses_multi_hop_and_keeps_one_hop(made):
    full, blind = (made.view.mean(frontier.NAME, arm, "accuracy") for arm in ("reprefill", "blind"))
    assert full >= blind + 0.3
    one_hop = made.view.mean(frontier.NAME, "blind", "accuracy", ONE)
    assert one_hop >= made.view.mean(frontier.NAME, "reprefill", "accuracy", ONE) - 0.25 >= 0.5


@pytest.mark.slow
def test_eta_is_1_for_reprefill_and_0_for_blind_and_mask(made):
    assert eta(made, "reprefill") == 1.0
    assert eta(made, "blind") == 0.0
    assert abs(eta(made, "mask")) < 0.1


@pytest.mark.slow
def test_more_rank_repairs_more(made):
    ranks = (*frontier.RANKS, frontier.HIGHEST)
    etas = [eta(made, "patch", rank=rank) for rank in ranks]
    assert etas[-1] > 0.99 > etas[0]
    assert all(later >= earlier - 0.05 for earlier, later in itertools.pairwise(etas))


@pytest.mark.slow
def test_rivals_keep_to_the_bytes_of_the_patch(made):
    for rank in frontier.RANKS:
        paid = made.view.mean(frontier.NAME, "patch", "nbytes", rank=rank)
        for arm in (*frontier.RIVALS, "shared-basis", "deep-half"):
            # a patch stores nothing at layer 0, whose bytes its budget has
            assert made.view.mean(frontier.NAME, arm, "nbytes", rank=rank) <= paid * 6 / 5, (arm, rank)


@pytest.mark.slow
def test_the_first_layer_has_no_deficit_and_the_others_do(made):
    norms = [(s["layer"], v[0]) for s, v in made.view.numbers("deficit", "relative norm")]
    assert {layer for layer, _ in norms} == set(range(made.view.family["layers"]))
    assert all((norm < 1e-5) == (layer == 0) for layer, norm in norms)


@pytest.mark.slow
def test_a_fresh_patch_beats_a_stale_one_after_full_turnover(made):
    stale, fresh = (made.view.mean("recall", arm, "eta", replaced=3) for arm in ("stale", "fresh"))
    assert fresh > 0.9 > stale


# -- what is concluded -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_claim_the_numbers_speak_against_is_told_on_the_page(made):
    gap = CLAIMS[0]
    assert gap not in [claim for claim, _ in disagreements(made.printed)["gqa"]]
    other, _ = changed(made.printed, frontier.NAME)
    rows = [r for r in other["families"]["gqa"]["rows"] if r["section"] == frontier.NAME]
    for row in rows:
        if row["arm"] == "blind":
            row["accuracy"] = [0.99, 0.98, 1.0]
    assert gap in [claim for claim, _ in disagreements(other)["gqa"]]
    disagreeing = render(other, []).split("## 1. ")[0]
    assert f"**{gap.name}.**" in disagreeing and "0.99" in disagreeing


@pytest.mark.slow
def test_what_was_not_measured_is_no_verdict(made):
    other = copy.deepcopy(made.printed)
    other["families"]["gqa"]["rows"] = []
    other["families"]["gqa"]["numbers"] = []
    assert disagreements(other)["gqa"] == []


@pytest.mark.slow
def test_a_backbone_that_answers_nothing_is_held_against_nothing(made):
    other = copy.deepcopy(made.printed)
    for row in other["families"]["gqa"]["rows"]:
        if row["section"] == frontier.NAME and row["arm"] == "reprefill":
            row["accuracy"] = [0.07, 0.05, 0.09]
    assert disagreements(other)["gqa"] == []
    assert "gqa cannot tell**: re-prefilled it answers 0.07" in render(other, [])


# -- the command line ------------------------------------------------------------------------------


def test_an_unknown_family_is_bad_usage_in_one_line(capsys, tmp_path):
    done = run(capsys, main, "--families", "gqa,rnn", "--output", tmp_path / "out")
    assert done.code == 2
    assert done.err.count("\n") == 1 and "'rnn'" in done.err and "mla" in done.err
    assert not (tmp_path / "out").exists()


def test_a_commit_outside_a_checkout_is_unknown(tmp_path):
    assert commit(tmp_path) == "unknown"


@pytest.mark.slow
def test_two_processes_measure_what_one_does(made, tmp_path):
    arguments = f"--families gqa,mha --items {ITEMS} --jobs 2 --output {tmp_path} -q"
    assert main(arguments.split()) == 0
    both = json.loads((tmp_path / "paper.json").read_text())["families"]
    assert list(both) == ["gqa", "mha"]
    assert both["gqa"]["rows"] == made.printed["families"]["gqa"]["rows"]
