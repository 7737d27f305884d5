"""The backbone nobody led binds in its KV, and needs its keys where they belong."""

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.sabotage.measure import measure
from lab.sabotage.setups import SETUPS
from lab.testbed import FAMILIES, load
from lab.testbed.directories import UNLED_BACKBONES, family_of
from lab.testbed.evaluate import HELD_OUT, VIEWS
from lab.testbed.scoring import accuracy


@pytest.fixture(scope="module", params=UNLED_BACKBONES)
def loaded(request):
    return request.param, *load(request.param)


@pytest.mark.slow
def test_the_items_frame_alone_answers_and_blind_reuse_does_not(loaded):
    name, model, processor = loaded
    episodes = [testbed.World(HELD_OUT).episode(700 + i, layout="LLI") for i in range(6)]
    masks = {name: VIEWS[name] for name in ("full", "evicted", "blind_evicted")}
    scores = accuracy(FAMILIES[family_of(name)], model, processor.tokenizer, episodes, masks)
    assert scores["full"]["2 hops"] >= 0.95 and scores["evicted"]["2 hops"] >= 0.95
    assert scores["full"]["glyph"] >= 0.95
    assert scores["blind_evicted"]["2 hops"] <= 0.2 and scores["blind_evicted"]["glyph"] >= 0.95


@pytest.mark.slow
def test_a_missing_turn_is_seen_in_what_it_decides(loaded):
    setups = [setup for setup in SETUPS if setup.name == "bound"]
    name, *pair = loaded
    *_, found = measure(name, HfEngine(*pair), "override", items=24, rank=32, setups=setups)
    rows = {row.arm: row for row in found.asked[0].rows}
    assert rows["sound"].eta.mean > 0.95
    assert rows["not rotated"].seen == rows["values left blind"].seen == "decisions"


def test_backbones_that_are_not_there_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'mha-unled': there are .*gqa-unled"):
        load("mha-unled")
