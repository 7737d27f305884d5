"""The diagnostics against brute force, and on models and workloads whose outcome is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import kv_slice, relocate_kv
from kamera.reuse import RULES, Prompt
from lab.reuse.forwards import places, prefilled, texts
from lab.reuse.invariance import auc, invariance
from lab.reuse.shift import shift
from lab.reuse.sink import SinkPoint, settled, sink_of
from tests.reuse.rig import family
from tests.sessions.rig import speaking

SCORES = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12)


@given(SCORES, SCORES)
def test_auc_is_the_share_of_ordered_pairs(positives, negatives):
    pairs = list(itertools.product(positives, negatives))
    share = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)
    assert auc(positives, negatives) == pytest.approx(share)


@pytest.mark.parametrize("name", ["llama_mqa", "deepseek_v3"])
def test_only_phased_channels_change_with_position(name):
    found = invariance(family(name), blocks=8, tokens=4, positions=(0, 9, 31))
    assert {one.phased for one in found} == {True, False}
    for one in found:
        if not one.phased:
            assert one.as_stored == one.moved
        if one.layer == 0:  # nothing precedes it: rotated to one position, equal content is equal
            assert one.moved == 1.0
            assert one.phased == (one.as_stored < 1.0)


def test_invariance_needs_two_of_each():
    for options in ({"blocks": 1}, {"positions": (3,)}, {"positions": (3, 3)}):
        with pytest.raises(ValueError, match="two of each"):
            invariance(family("llama_mqa"), **options)


def test_a_segment_behind_the_whole_prompt_does_not_drift():
    found = sink_of(family("llama_mqa"), ladder=(0, 8, 24), prompt=24, segment=10, segments=2)
    assert [p.tokens for p in found.points] == [0, 8, 24]
    last = found.points[-1]
    assert max(last.edge, last.rest) < 1e-5
    assert last.kl < 1e-5 * found.points[0].kl, "rounding, next to what drifts"
    assert found.points[0].edge > 0.01
    with pytest.raises(ValueError, match="count up from 0"):
        sink_of(family("llama_mqa"), ladder=(1, 8), prompt=24, segment=10)


def test_drift_is_that_of_a_prefill_at_the_same_place():
    backbone, (ids,) = family("llama_mqa"), texts(family("llama_mqa"), 1, 38)
    before, body, _ = ids.split([24, 10, 4])
    at_before, at_body, _ = places(backbone, [24, 10, 4])
    context = prefilled(backbone, before, at_before)
    exact, alone = (
        kv_slice(prefilled(backbone, body, at_body, [behind]), 4, 10)
        for behind in (context, relocate_kv(kv_slice(context, 0, 8), backbone.layout, (16,)))
    )
    wanted = [
        float((a[name] - b[name]).norm() / b[name].norm())
        for a, b in zip(alone, exact, strict=True)
        for name in b
    ]
    found = sink_of(backbone, ladder=(0, 8, 24), prompt=24, segment=10, segments=1)
    assert found.points[1].rest == pytest.approx(sum(wanted) / len(wanted), rel=1e-4)


def test_a_sink_is_where_the_drift_settles():
    def points(*drift: float) -> list[SinkPoint]:
        return [SinkPoint(2**i, value, 0.0, 0.0) for i, value in enumerate(drift)]

    assert settled(points(1.0, 0.9, 0.14, 0.12, 0.1)) == 4
    assert settled(points(1.0, 0.1, 0.9, 0.12, 0.1)) == 8  # it has to stay there
    assert settled(points(1.0, 0.8, 0.6, 0.4, 0.2)) is None
    assert settled(points(0.1, 0.1, 0.1)) == 1


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, count)


def test_early_variation_predicts_what_is_recovered():
    body = words(1, 2_000)
    rotating = [Prompt.of(np.concatenate([words(10 + i, 34), body]), anchors=[34]) for i in range(8)]
    early = shift(rotating, RULES["anchors"])
    assert early.first_variation < 0.01
    assert early.predicted == pytest.approx(2_000 / 2_034, abs=0.01)
    assert early.measured == pytest.approx(early.predicted, abs=0.01)
    growing = [Prompt.of(np.concatenate([body, words(10 + i, 34)]), anchors=[2_000]) for i in range(8)]
    deep = shift(growing, RULES["anchors"])
    assert deep.first_variation == pytest.approx(2_000 / 2_034, abs=0.01)
    assert deep.predicted < 0.01 and deep.measured == 0.0
    assert deep.variation_set == pytest.approx(1.0) and deep.segment == pytest.approx(34.0)
    with pytest.raises(ValueError, match="three or more"):
        shift(rotating[:2], RULES["anchors"])


def test_runs_of_text_come_from_the_text():
    backbone = speaking("plain")
    ids = backbone.builder.tokenize("one two three four five six seven eight nine")
    runs = texts(backbone, 3, 8, text="one two three four five six seven eight nine")
    assert [r.tolist() for r in (runs[0], runs[-1])] == [ids[:8].tolist(), ids[-8:].tolist()]
    with pytest.raises(ValueError, match="longer text"):
        texts(backbone, 3, 80, text="short")
    assert [len(r) for r in texts(backbone, 2, 5)] == [5, 5]
