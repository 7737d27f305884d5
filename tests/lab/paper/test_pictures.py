"""``python -m lab.paper --model --data``: a checkpoint in a folder, and pictures nobody drew for it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.errors import TaskDataError
from kamera.patches import prefill_anchor
from kamera.testbed import weights_dir
from lab.paper.__main__ import main
from lab.paper.draw import MAIN, POOL, TARGET
from lab.paper.own import stages
from lab.paper.pictures import QUESTIONS, Pictures
from lab.paper.run import IN_PAPER, TABLES, tables_of
from tests.cli.run import run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return shutil.copytree(weights_dir(), tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(POOL + 2):
        pixels = np.random.default_rng(index).integers(0, 255, (64, 48, 3), dtype=np.uint8)
        (folder / "more").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / ("more" if index % 2 else ".") / f"{index:02}.jpg")
    return folder


@pytest.mark.slow
def test_one_command_gives_the_papers_table_on_a_model(capsys, checkpoint, pictures, tmp_path):
    command = ("--model", checkpoint, "--data", pictures, "--items", 4, "--table", 1, "--dtype", "float32")
    found = run(capsys, main, *command, "--output", tmp_path / "out", "--format", "json", "-q")
    assert found.code == 0, found.err
    document = found.document
    assert json.loads((tmp_path / "out" / "paper.json").read_text()) == document
    rows = document["families"]["mine"]["rows"]
    assert {row["section"] for row in rows} == {"recall", "survivors"}
    at = {(row["section"], row["arm"], row["setting"].get("replaced")): row for row in rows}
    # nobody knows the answers: the re-prefill is right
    assert at["recall", "reprefill", 3]["accuracy"][0] == 1.0 and at["recall", "reprefill", 3]["n"] >= 4
    assert at["recall", "fresh", 3]["kl"][0] < at["recall", "blind", 3]["kl"][0]
    page = (tmp_path / "out" / "paper.md").read_text()
    assert "## recall, mine" in page and "(recall.png)" in page and "(modality.png)" not in page


def test_stages_draw_from_the_folder_by_their_seed(checkpoint, pictures):
    (pictures / "questions.txt").write_text("What is it?\n\nWhere is it?\n")
    source = Pictures.read(pictures)
    (pictures / "questions.txt").unlink()
    assert source.questions == ("What is it?", "Where is it?") and len(source.files) == POOL + 2
    assert Pictures.read(pictures).questions == QUESTIONS
    backbone = HfEngine(*testbed.load())
    anchor, make = prefill_anchor(backbone, None), stages(source)
    stage = make(backbone, anchor, 5, 0, None)
    assert stage.pool == make(backbone, anchor, 5, 0, None).pool != make(backbone, anchor, 6, 0, None).pool
    assert len(set(stage.pool)) == POOL
    assert [question.text for question in stage.questions(MAIN, 1)] == ["What is it?"]
    assert stage.twin(TARGET) is None
    caption = stage.pool[TARGET].with_suffix(".txt")
    caption.write_text("a cup\n")
    assert stage.twin(TARGET) == [{"type": "text", "text": "a cup\n"}]
    caption.unlink()
    trial = stage.trial(MAIN)
    assert trial.reprefill.right.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("--model", "x"), 2, "--model and --data belong together"),
        (("--model", "x", "--data", "nowhere"), 1, "no folder 'nowhere'"),
        (("--model", "x", "--data", "FEW"), 1, "holds 1 pictures (.png, .jpg"),
        (("--model", "nowhere", "--data", "PICTURES"), 1, "nowhere"),
        (("--table", "2"), 2, "table 2 is not measured here: there are table 1, table 3"),
        (("--figure", "11"), 2, "figure 11 is of memory and time: python -m lab.speed measures it"),
    ],
)
def test_missing_data_is_refused_by_name(capsys, pictures, tmp_path, arguments, code, said):
    (tmp_path / "few").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "few" / "a.png")
    places = {"PICTURES": pictures, "FEW": tmp_path / "few"}
    found = run(capsys, main, *(places.get(a, a) for a in arguments))
    assert found.code == code and said in found.err


def test_a_folder_that_asks_nothing_is_refused(pictures):
    (pictures / "questions.txt").write_text("\n")
    with pytest.raises(TaskDataError, match="asks nothing"):
        Pictures.read(pictures)
    (pictures / "questions.txt").unlink()


def test_every_table_and_figure_of_the_paper_names_what_is_measured():
    assert set(IN_PAPER) == {
        *("table 1", *(f"table {n}" for n in range(3, 9))),
        *(f"figure {n}" for n in range(3, 11)),
    }
    assert all(set(names) <= set(TABLES) for names in IN_PAPER.values())
    assert tables_of(["table 1", "figure 10"]) == ("recall", "survivors", "modality")
    assert tables_of([]) == tuple(TABLES)
