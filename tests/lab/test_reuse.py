"""Boundary states, and the scripts that measure `kamera.reuse`: what they store, repair and count."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from lab.recompute import Resume, hidden_states, recompute
from lab.reuse import breakeven
from lab.reuse.boundary import Boundary, Multicut, above, hidden_bytes, rank_of
from lab.reuse.exact import backbones, drawn, run
from tests.engines.compare import relative
from tests.lab.scenes import FAMILIES
from tests.lab.scenes import scene_of as new_scene

family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
scene_of = functools.cache(new_scene)


@family
def test_layers_up_to_the_cut_stay_as_stored(family):
    scene = scene_of(family)
    layers = len(scene.layout)
    for cut in range(1, layers):
        kv = above(scene, cut)
        for layer in range(layers):
            for name, tensor in kv[layer].items():
                off = relative(tensor, scene.blind[layer][name])
                # the state at the cut gives the KV of the layer it enters, so repair begins behind it
                assert off < 1e-5 if layer <= cut else off > 1e-4


@family
def test_a_state_of_this_context_repairs_all_above(family):
    scene = scene_of(family)
    cut = len(scene.layout) - 1
    entry = hidden_states(scene.backbone, scene.encoded, scene.positions, scene.context, cut)
    rows = torch.arange(scene.target.num_tokens)
    made = recompute(
        scene.backbone,
        scene.encoded,
        scene.positions,
        scene.context,
        scene.blind,
        rows,
        resume=Resume(cut, entry),
    ).kv
    for name, tensor in made[cut].items():
        assert relative(tensor, scene.conditioned[cut][name]) < 1e-5


@family
def test_a_state_takes_d_model_per_token(family):
    scene = scene_of(family)
    width = scene.backbone.model.get_input_embeddings().weight.shape[1]
    assert hidden_bytes(scene) == scene.target.num_tokens * width * scene.dtype.itemsize
    served = Boundary(1).serve(scene)
    assert served.nbytes == hidden_bytes(scene)
    rank = rank_of(scene, served.nbytes)
    assert scene.budget(rank) <= served.nbytes or rank == 1
    assert scene.budget(rank + 1) > served.nbytes or rank == scene.target.num_tokens


@family
def test_multicut_goes_from_blind_to_prefilled(family):
    scene = scene_of(family)
    assert Multicut(-1.0).serve(scene).kv is scene.blind
    strict = Multicut(1.1).serve(scene)
    assert strict.kv is scene.conditioned
    assert strict.tokens_recomputed == scene.target.num_tokens + 2


def test_random_prompts_reuse_and_do_not_diverge():
    backbone = backbones()["gqa"]
    found = run(backbone, 12, seed=0, stop=float("inf"))
    assert (found["prompts"], found["divergences"]) == (12, 0)
    assert found["tokens by tier"]["exact"] > 0
    draw, pool = random.Random(0), [[1] * 6, [2] * 6]
    orders = [drawn(draw, pool, [0, 1]) for _ in range(50)]
    assert len(pool) > 2 and all(0 < len(order) <= 10 for order in orders)


@pytest.mark.slow
def test_break_even_divides_what_storing_cost_by_what_a_reuse_saves():
    found = breakeven.measure(body=64, rounds=1)
    rows = {(row["form"], row["tier"]): row for row in found["rows"]}
    stored = {(form, "patched") for form in breakeven.FORMS}
    assert set(rows) == stored | {("live session", "exact"), ("proved", "patched")}
    seconds = found["seconds"]
    for (form, tier), row in rows.items():
        if form != "live session":
            assert row["invested"] == seconds[f"{form} miss"] - seconds["no cache"]
            assert row["saved"] == seconds["no cache"] - seconds[f"{form} {tier}"]
        if row["f_star"] is not None:
            assert row["f_star"] * row["saved"] == pytest.approx(row["invested"])
    sizes = [rows[form, "patched"]["bytes"] for form in ("as-is", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
