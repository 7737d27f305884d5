"""The model card's table says what the metrics files say."""

import json
from dataclasses import asdict
from pathlib import Path

from lab import testbed
from lab.testbed import FAMILIES, weights_dir
from lab.testbed.card import BEGIN, BEGIN_UNLED, END, END_UNLED, measured, measured_unled
from lab.testbed.directories import UNLED
from lab.testbed.unled.schedule import Schedule


def test_the_card_shows_the_shipped_metrics():
    metrics = {f: json.loads((weights_dir(f) / "metrics.json").read_text()) for f in FAMILIES}
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


def test_the_card_shows_the_metrics_of_the_unled_backbone():
    found = json.loads((weights_dir(f"gqa{UNLED}") / "metrics.json").read_text())
    card = (Path(testbed.__file__).parent / "MODEL_CARD.md").read_text()
    shown = card.split(BEGIN_UNLED)[1].split(END_UNLED)[0].strip()
    assert shown == measured_unled(found)
    assert {"LI", "LLI", "LLLI", "LLLLI"} <= set(found["layouts"])


def test_the_unled_backbone_is_the_output_of_the_seeded_schedule():
    run = json.loads((weights_dir(f"gqa{UNLED}") / "training.json").read_text())
    schedule = json.loads(json.dumps(asdict(Schedule())))
    assert {name: run[name] for name in schedule} == schedule
    assert run["history"][-1]["step"] + run["skipped"] == Schedule().steps
