"""In each kind of family: a window whose anchor moved answers as one whose keys were all turned home."""

from __future__ import annotations

import pytest
import torch

from kamera.patches.chunks import compact_positions
from kamera.window import plan, sequence_of
from tests.engines.compare import relative, worst
from tests.models import tiny
from tests.window.rig import (
    GREEDY,
    QUESTION,
    SYSTEM,
    Prefilled,
    chunks_of,
    frame,
    live,
    make,
    rig,
    rope_index,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny.of_each_kind((*tiny.FAMILIES, *tiny.LIMITED)))
def test_where_the_frame_stands_changes_no_answer(family, monkeypatch):
    backbone, chunks = rig(family, 3)
    if family == "dynamic_ntk":  # its positions end where three chunks do
        chunks = chunks[:2]
    framed, home = make(backbone, None, *chunks), make(backbone, None, *chunks)
    framed.slide()
    with monkeypatch.context() as patch:
        patch.setattr(plan, "DRIFT", 0)
        home.slide()
    assert frame(home) == (0,) * backbone.axes
    assert torch.equal(sequence_of(framed).position_ids, sequence_of(home).position_ids)
    for i in range(len(framed)):
        assert worst(live(framed, i), live(home, i)) <= 1e-5
    assert relative(framed.next_token_logits(QUESTION), home.next_token_logits(QUESTION)) <= 1e-4
    if not hasattr(backbone.model, "generate"):
        return
    asked = [w.generate(QUESTION, max_new_tokens=3, **GREEDY).tolist() for w in (framed, home)]
    assert asked[0] == asked[1]


@pytest.mark.few(5)
@pytest.mark.parametrize("family", tiny.of_each_kind((*tiny.FAMILIES, *tiny.LIMITED)))
def test_positions_added_up_are_those_of_the_whole_sequence(family):
    backbone, chunks = rig(family, 3)
    window = make(backbone, None, *chunks)
    encoded = window._state.encoded
    ids = [SYSTEM, *(f.input_ids for f in encoded)]
    whole = backbone.positions(ids, [{}, *(f.position_inputs for f in encoded)])
    assert torch.equal(torch.cat(compact_positions(backbone, SYSTEM, encoded), dim=1), whole[:, 4:])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_an_arrival_in_a_frame_is_exact_without_evictions(family):
    """An emptied window leads again, wherever its anchor stood."""
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks[:2])
    window.slide()
    window.slide()
    for chunk in chunks[2:]:
        window.append(chunk)
    plain = Prefilled(backbone, chunks_of(window, chunks))
    assert relative(window.next_token_logits(QUESTION), plain.logits) <= 1e-4
    assert {s.guarantee for s in window.slots} == {"exact"}
    assert torch.equal(sequence_of(window).position_ids, rope_index(backbone, chunks_of(window, chunks)))
