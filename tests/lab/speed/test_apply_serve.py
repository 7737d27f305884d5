"""The two benchmarks run on the tiny preset, and what they time is what Kamera does."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import torch

from kamera.engines.hf import forwards
from kamera.ops import apply_patch, kv_slice
from kamera.ops.kernels import Path
from kamera.ops.kernels import serve as fused
from kamera.window import former_of
from lab.speed import apply, serve
from lab.speed.content import noise_kv, noise_patch
from lab.speed.presets import TINY
from lab.speed.settings import Settings
from lab.speed.table import GOALS
from lab.speed.timing import Spread

QUICK = {"rounds": 2, "min_rounds": 1, "seconds": 0.0}


@pytest.fixture(scope="module")
def applied():
    return apply.run(Settings("tiny", lengths=(32, 96), **QUICK))


@pytest.fixture(scope="module")
def served():
    return serve.run(Settings("tiny", lengths=(48,), **QUICK))


def test_apply_has_every_way_at_every_length(applied):
    rows = applied.sections[0].rows
    ways = ["re-prefill", "patched", "blind", "patched, int8", "patched, int4"]
    assert [(r["tokens"], r["way"]) for r in rows] == [(n, w) for n in (32, 96) for w in ways]
    for row in rows:
        if row["way"] != "re-prefill":
            assert row["times faster"].median > 0 and row["path"] in get_args(Path)


def test_moved_bytes_are_those_of_canonical_factors_and_slot(applied):
    rows = {(r["tokens"], r["way"]): r for r in applied.sections[0].rows}
    per_token = applied.model["KV bytes per token"]
    assert rows[96, "blind"]["moved MB"] * 1e6 == pytest.approx(2 * 96 * per_token)
    assert rows[96, "patched"]["moved MB"] > rows[96, "blind"]["moved MB"]
    # codes are read instead of floats
    moved = [rows[96, way]["moved MB"] for way in ("patched", "patched, int8", "patched, int4")]
    assert moved == sorted(moved, reverse=True)


def test_what_apply_times_writes_what_apply_patch_says():
    backbone = TINY.build(dtype=torch.float32)
    canonical = noise_kv(backbone, 40, seed=1)
    patch, offset = noise_patch(canonical, backbone.layout), [apply.CONTEXT] * backbone.axes
    slot = kv_slice(forwards.allocate_kv(backbone, 60), 20, 60)
    fused(slot, canonical, patch, backbone.layout, offset)
    wanted = apply_patch(canonical, patch, backbone.layout, offset)
    for got, want in zip(slot, wanted, strict=True):
        for name in want:
            torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("way", ["patched", "blind"])
def test_apply_is_held_against_a_plain_copy(applied, way):
    goals = next(s for s in applied.sections if s.title == GOALS).rows
    (row,) = (row for row in goals if row["goal"].startswith(f"apply, {way}: "))
    shares = [r["share of copy"].median for r in applied.sections[0].rows if r["way"] == way]
    assert row["is"].median == pytest.approx(1 / min(shares))
    assert row["at most"] == 2.0 and row["met"] == (row["is"].median <= 2.0)


def test_serve_has_both_changes_and_every_way(served):
    rows = served.sections[0].rows
    assert [(r["change"], r["way"]) for r in rows] == [
        (serve.BACK, "kamera"),
        (serve.BACK, "re-prefill"),
        (serve.BACK, "full recompute"),
        (serve.BACK, "15 % recompute"),
        (serve.BACK, "question alone"),
        (serve.GONE, "kamera, slide"),
        (serve.GONE, "prefix cache"),
    ]
    assert [r["times as long"] is None for r in rows] == [True, *[False] * 4, True, False]


@pytest.fixture(scope="module")
def scene():
    return serve.Scene(TINY, TINY.build(dtype=torch.float32), 48)


def work(scene, act, prepare=None):
    given = () if prepare is None else (prepare(),)
    with scene.backbone.measure() as counted:
        logits = act(*given)
    return logits, (counted.forwards, counted.tokens, counted.vision_encodes)


def test_kamera_runs_the_question_alone(scene):
    question = serve.QUESTION
    assert work(scene, scene.recall, scene.away)[1] == (1, question, 0)
    assert work(scene, scene.slide, scene.both)[1] == (1, question, 0)


def test_the_others_run_what_they_are_said_to_run(scene):
    question, length = serve.QUESTION, 48
    assert work(scene, scene.reprefill, scene.behind_context)[1] == (1, length + question, 0)
    assert work(scene, scene.full, scene.behind_context)[1] == (1, length + question, 1)
    assert work(scene, scene.some)[1] == (1, 8 + question, 0)  # 15 % of 48, rounded up
    behind_anchor = work(
        scene, scene.after_anchor, lambda: forwards.make_cache(scene.backbone, [scene.anchor])
    )
    assert behind_anchor[1] == (1, length + question, 0)


def test_the_one_forward_of_the_others_gives_the_window_s_logits(scene):
    alone = scene.holding(scene.segment)  # behind the system prompt alone its canonical is exact
    cache = forwards.make_cache(scene.backbone, [former_of(alone).anchor.kv])
    wanted = alone.next_token_logits(scene.question)
    torch.testing.assert_close(scene.after_anchor(cache), wanted, rtol=1e-4, atol=1e-5)


def test_a_recall_is_timed_whole_every_time(scene):
    # what was written for an earlier round must not be found standing there
    for _ in range(2):
        window = scene.away()
        assert len(window) == 1
        report = window.recall(scene.segment.id)
        assert report.slot.guarantee == "patched"
        assert report.bytes_rotated > 0 and report.bytes_patched > 0


def test_what_kamera_answers_is_what_a_full_rank_window_would(scene):
    from kamera import ChunkStore, KameraWindow, ReusePolicy

    exact = KameraWindow(
        scene.backbone,
        ChunkStore.open("memory://"),
        scene.system,
        policy=ReusePolicy(minimum="exact", certified=False),
    )
    exact.append(scene.context)
    exact.append(scene.segment)
    served, _ = work(scene, scene.recall, scene.away)
    wanted = exact.next_token_logits(scene.question)
    # 48 tokens of a tiny model: rank 32 leaves little out
    assert float((served - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("name", ["applied", "served"])
def test_a_result_says_how_to_get_it_again(name, request):
    result = request.getfixturevalue(name)
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["command"].startswith(f"python -m lab.speed {result.name} --preset tiny --lengths ")
    assert document["machine"]["threads"] == 1 and document["commit"]
    assert document["settings"]["dtype"] == "bfloat16" and document["model"]["layers"] == 2
    cell = next(c for s in result.sections for r in s.rows for c in r.values() if isinstance(c, Spread))
    assert cell.low <= cell.median <= cell.high
