"""The model card's table says what the metrics files say."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lab import testbed
from lab.testbed import FAMILIES, weights_dir
from lab.testbed.card import BEGIN, BEGIN_UNLED, END, END_UNLED, measured, measured_unled, metrics_of
from lab.testbed.directories import UNLED_BACKBONES, family_of
from lab.testbed.unled.schedule import Schedule
from lab.testbed.unled.windows import Size


def test_the_card_shows_the_shipped_metrics():
    metrics = metrics_of(FAMILIES)
    card = (Path(testbed.__file__).parent / "MODEL_CARD.md").read_text()
    shown = card.split(BEGIN)[1].split(END)[0].strip()
    assert shown == measured(metrics)
    assert shown.count("\n") > 50  # thirteen windows of four families


def test_every_backbone_has_its_seeded_training_command():
    for family in FAMILIES:
        run = json.loads((weights_dir(family) / "training.json").read_text())
        assert run["family"] == family and run["seed"] == 0
        assert run["history"][0]["step"] == run["every"]  # it starts at the start
        assert run["history"][-1]["step"] == run["steps"]


def test_the_card_shows_the_metrics_of_the_unled_backbones():
    found = metrics_of(UNLED_BACKBONES)
    card = (Path(testbed.__file__).parent / "MODEL_CARD.md").read_text()
    shown = card.split(BEGIN_UNLED)[1].split(END_UNLED)[0].strip()
    assert shown == measured_unled(found)
    for one in found.values():
        assert {"LI", "LLI", "LLLI", "LLLLI"} <= set(one["layouts"])


@pytest.mark.parametrize("name", UNLED_BACKBONES)
def test_an_unled_backbone_is_the_output_of_the_seeded_schedule(name):
    run = json.loads((weights_dir(name) / "training.json").read_text())
    own = Schedule(family_of(name))
    schedule = json.loads(json.dumps(asdict(own)))
    # runs from nothing on the world's own frames name no start, no trained tower and no other size
    run = {"start": "", "vision": False, "least": 3, "judged": None} | run
    for phase in run["phases"]:
        phase["size"] = phase["size"] and asdict(Size(**phase["size"]))
    assert {key: run[key] for key in schedule} == schedule
    assert run["history"][-1]["step"] + run["skipped"] == own.steps
