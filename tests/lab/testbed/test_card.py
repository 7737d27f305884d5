"""The model card's table says what the metrics files say."""

import json
from pathlib import Path

from lab import testbed
from lab.testbed import FAMILIES, weights_dir
from lab.testbed.card import BEGIN, END, measured


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
