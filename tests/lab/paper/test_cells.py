"""The claims in three worlds: stages of a world, wrong operators, cells and their page."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import prefill_anchor
from lab.paper import recall, survivors, worlds
from lab.paper.__main__ import main
from lab.paper.cells import Cell, changed, keep_rows, measure_cell, verdict, worlds_of, write
from lab.paper.draw import HELD_OUT, MAIN, NEW, TARGET, Stage
from lab.paper.judges import View
from lab.paper.run import TABLES, backbone_of
from lab.paper.tally import Tally
from lab.paper.verdicts import CLAIMS, judged
from lab.paper.wrong import Wrong, operator
from lab.repairs import Keep, PlainPatch
from lab.sabotage.arms import SOUND, rotated_twice, sabotage, sound, values_blind
from lab.testbed import weights_dir
from lab.testbed.regimes import REGIMES
from tests.cli.run import run

CLAIM = {claim.name: claim for claim in CLAIMS}
ORBIT = "Orbit patch ≈ the ordering's own (η, K = 3, 4, 6)"
RESULTS = Path(__file__).parents[3] / "docs" / "results" / "paper" / "paper.json"


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def stage(backbone):
    return Stage(backbone, prefill_anchor(backbone, testbed.SYSTEM), HELD_OUT, 0, regime="redundant")


# -- the worlds ------------------------------------------------------------------------------------


def drawn(regime: str, index: int = 0) -> testbed.Episode:
    return Stage(None, None, HELD_OUT, index, regime=regime).episode  # type: ignore[arg-type]


def test_antecedents_agree_in_every_world_but_override():
    legends = (*range(6), *NEW)
    for regime in ("redundant", "static"):
        assert {drawn(regime).frames[i].kind for i in legends} == {"legend"}
    assert len({drawn("static").frames[i] for i in legends}) == 1
    assert len({drawn("redundant").frames[i] for i in legends}) > 6
    assert {drawn("override").frames[i].kind for i in legends} == {"legend", "rename"}


@pytest.mark.parametrize("regime", REGIMES)
def test_what_left_has_questions_in_every_world(regime):
    before = (NEW[0], MAIN[0])
    for index in range(8):
        episode = drawn(regime, index)
        asked = survivors.read_from(regime, episode, before)
        assert asked
        for subject in asked:
            without = episode.ask(*subject, order=(MAIN[0], TARGET))
            if regime == "override":
                assert MAIN[0] not in without.frames  # nobody who stays says it
            elif regime == "static":
                assert without.answer == episode.ask(*subject, order=(*before, TARGET)).answer


# -- wrong operators -------------------------------------------------------------------------------


def test_a_stage_under_an_operator_shares_what_is_true(stage):
    trial = stage.trial(MAIN)
    own = trial.patched(16), trial.reference, trial.blind
    patch = trial.scene.patch
    right = stage.under(operator(sound, patch, patch, 0)).trial(MAIN)
    assert right.reference is own[1] and right.blind is own[2]
    assert torch.equal(torch.tensor(right.patched(16).kl), torch.tensor(own[0].kl))
    wrong = stage.under(operator(values_blind, patch, patch, 0)).trial(MAIN)
    assert wrong.patched(16).kl.mean() > 0.5 * own[2].kl.mean() > 10 * own[0].kl.mean()
    # the stage itself has not changed
    assert stage.trial(MAIN) is trial and torch.equal(trial.reference, own[1])
    assert trial.judge(PlainPatch(16)).kl.mean() == own[0].kl.mean()


def test_kv_kept_without_a_patch_is_only_moved_wrongly(stage):
    scene = stage.scene(MAIN)
    keep = Keep(stage.chunks((NEW[0], *MAIN)))
    served = {
        name: keep.serve(scene.under(operator(arm, scene.patch, scene.patch, 0))).kv
        for name, arm in (("sound", sound), ("values", values_blind), ("twice", rotated_twice))
    }
    true = keep.serve(scene).kv
    same = {
        n: all(torch.equal(a["k"], b["k"]) for a, b in zip(kv, true, strict=True)) for n, kv in served.items()
    }
    assert same == {"sound": True, "values": True, "twice": False}


@pytest.mark.slow
def test_every_wrong_operator_is_asked_what_the_sound_is(stage):
    tally, wrong = Tally(), Wrong(3, 4, (recall.NAME,))
    recall.measure(stage, tally)
    wrong.measure(stage)
    wrong.measure(stage)  # enough was asked: nothing is asked again
    assert list(wrong.tallies) == [SOUND, *sabotage(3)]
    assert (
        len({tally.questions(recall.NAME), *(t.questions(recall.NAME) for t in wrong.tallies.values())}) == 1
    )
    eta = {name: fresh(under) for name, under in wrong.tallies.items()}
    assert eta[SOUND] == pytest.approx(fresh(tally), abs=1e-9) and eta[SOUND] > 0.9
    assert eta["values left blind"] < 0.1 and eta["another's patch"] < 0.5


def fresh(tally: Tally) -> float:
    at = {"arm": "fresh", "setting": {"replaced": 0}, "kind": "multi-hop"}
    return next(r.eta.mean for r in tally.rows() if all(getattr(r, k) == v for k, v in at.items()))


# -- a cell and its page ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family() -> dict[str, Any]:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["families"]["gqa"]
    return {**found, "rows": keep_rows(found["rows"])}


def cell_of(family: dict[str, Any], world: str, dtype: str = "float32") -> dict[str, Any]:
    name = next(name for name, claim in CLAIM.items() if claim.served)
    rows = [
        {"arm": arm, "accuracy": [1.0, 1.0, 1.0], "eta": [1.0, 1.0, 1.0], "seen": None} for arm in ("sound",)
    ]
    setup = {"name": "bound", "n": 24, "reprefill": [1.0, 1.0, 1.0], "rows": rows}
    return {
        "cell": vars(Cell("gqa", world, dtype)),
        "items": 96,
        "seconds": 1.0,
        "commit": "abc",
        "family": copy.deepcopy(family),
        "wrong": {"asked": {name: True, ORBIT: True}, "changed": {"not rotated": [], "random patch": [name]}},
        "bed": {"setups": [setup, {"name": "last says", "n": 0, "rows": []}]},
    }


def test_a_kept_row_gives_the_verdict_of_a_whole_one(family):
    whole = View("gqa", json.loads(RESULTS.read_text(encoding="utf-8"))["families"]["gqa"])
    cell = cell_of(family, "override")
    for claim in CLAIMS:
        assert verdict(cell, claim).agrees == judged(claim, whole).agrees, claim.name


def test_claims_about_change_say_nothing_where_nothing_changes(family):
    static = cell_of(family, "static")
    for claim in CLAIMS:
        assert (verdict(static, claim).agrees is None) >= claim.differing
    assert verdict(static, CLAIM["Blind reuse breaks multi-hop answers"]).agrees is True
    assert set(TABLES) - set(Cell("gqa", "static", "float32").tables) == {"reorder", "envelope", "refresh"}
    assert Cell("gqa", "redundant", "float32").tables == tuple(TABLES)


def test_a_verdict_no_wrong_operator_changes_is_called_blind(family):
    cell = cell_of(family, "override")
    seen, unseen = CLAIM[next(iter(cell["wrong"]["asked"]))], CLAIM[ORBIT]
    assert changed(cell, seen) == (["random patch"], 2) and changed(cell, unseen) == ([], 2)
    assert changed(cell, CLAIM["One-hop answers survive it"]) is None
    page = worlds.page([cell])
    assert f"| {ORBIT} | **differs** **blind** |" in page and f"| {seen.name} | **differs** 1/2 |" in page
    assert "| One-hop answers survive it | agrees |" in page


def test_the_page_tells_whose_world_a_disagreement_is(family):
    agreeing = cell_of(family, "redundant")
    for row in agreeing["family"]["rows"]:
        if row["section"] == "reorder" and row["arm"] == "orbit":
            row["eta"] = [1.0]
    page = worlds.page([cell_of(family, "override"), agreeing, cell_of(family, "static")])
    assert f"| {ORBIT} | gqa |  | – |" in page
    only = next(line for line in page.splitlines() if "Only where a later frame overrides" in line)
    assert ORBIT in only and "One layer alone" not in only
    every = next(line for line in page.splitlines() if "In every world" in line)
    assert "One layer alone" in every and ORBIT not in every


def test_cells_of_a_folder_make_its_page_in_order(family, tmp_path):
    (tmp_path / worlds.CELLS).mkdir()
    for world, dtype in (("static", "float32"), ("override", "bfloat16"), ("override", "float32")):
        cell = cell_of(family, world, dtype)
        write(cell, tmp_path / worlds.CELLS / f"{Cell(**cell['cell']).name}.json")
    found = worlds.cells(tmp_path / worlds.CELLS)
    assert found[0] == cell_of(family, "override")
    names = ["gqa-override-float32", "gqa-static-float32", "gqa-override-bfloat16"]
    assert [Cell(**cell["cell"]).name for cell in found] == names
    worlds.main(tmp_path)
    assert (tmp_path / worlds.PAGE).read_text(encoding="utf-8") == worlds.page(found)
    assert max(path.stat().st_size for path in tmp_path.rglob("*.json")) < 150_000


def test_the_shipped_page_is_that_of_the_shipped_cells():
    found = worlds.cells(worlds.RESULTS / worlds.CELLS)
    assert found and (worlds.RESULTS / worlds.PAGE).read_text(encoding="utf-8") == worlds.page(found)


# -- the command line ------------------------------------------------------------------------------


def test_worlds_are_named_with_commas_or_again():
    assert worlds_of(["override,static", "static", "redundant"]) == ["override", "static", "redundant"]
    with pytest.raises(ValueError, match="no world 'stat': there are override, redundant, static"):
        worlds_of(["override,stat"])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--world", "winter"), "no world 'winter'"),
        (("--world", "static", "--table", 1), "--world measures all tables of the testbed"),
        (("--world", "static", "--families", "gqa,rnn"), "no testbed family 'rnn' and no such directory"),
    ],
)
def test_a_bad_cell_is_one_line(capsys, tmp_path, arguments, said):
    done = run(capsys, main, *arguments, "--output", tmp_path / "out")
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_cell_that_is_there_is_left_alone(capsys, family, tmp_path):
    path = tmp_path / worlds.CELLS / "gqa-static-float32.json"
    path.parent.mkdir()
    write(cell_of(family, "static"), path)
    before = path.read_bytes()
    done = run(capsys, main, "--families", "gqa", "--world", "static", "--output", tmp_path)
    assert done.code == 0 and "gqa-static-float32 is there" in done.err
    assert path.read_bytes() == before


def test_a_directory_of_weights_is_a_family_in_its_dtype():
    backbone = backbone_of(str(weights_dir("gqa-unled")), "bfloat16")
    assert backbone.model.dtype is torch.bfloat16
    assert backbone.fingerprint == backbone_of("gqa-unled", "bfloat16").fingerprint


@pytest.mark.slow
def test_a_cell_is_measured_whole(backbone):
    *_, found = measure_cell(Cell("gqa", "static", "float32"), backbone, items=4, seed=0, command="x")
    json.dumps(found, allow_nan=False)
    said = {claim.name: verdict(found, claim).agrees for claim in CLAIMS}
    assert {name for name, agrees in said.items() if agrees is None} == {
        c.name for c in CLAIMS if c.differing
    }
    turned = found["wrong"]["changed"]
    assert len(turned["random patch"]) > len(turned["patch in the wrong frame"])
    assert [one["name"] for one in found["bed"]["setups"]] == ["bound", "last says"]
