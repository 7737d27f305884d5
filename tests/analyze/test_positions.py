"""Position invariance, attention sinks and the break-even, against brute force and on models of known KV."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kamera.analyze import auc, breakeven, repaid, roc, sink
from kamera.engines.hf import HfEngine
from tests.cli.run import kamera
from tests.models import tiny
from tests.reuse.rig import family, words

SCORES = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12)


@given(SCORES, SCORES)
def test_auc_is_the_share_of_ordered_pairs(positives, negatives):
    pairs = list(itertools.product(positives, negatives))
    share = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)
    assert auc(positives, negatives) == pytest.approx(share)


@pytest.mark.parametrize("name", ["llama_mqa", "deepseek_v3"])
def test_only_phased_channels_change_with_position(name):
    ids = torch.arange(200) * 59 % 131 + 9  # no two blocks end alike
    found = roc(family(name), ids, blocks=8, tokens=4, room=100)
    assert found["positions"] == [0, 12, 25, 50, 87]
    assert {row["phased"] for row in found["channels"]} == {True, False}
    for row in found["layers"]:
        if not row["phased"]:
            assert row["as_stored"] == row["moved"]
        elif row["layer"] == 0:  # nothing precedes it: rotated to one position, equal content is equal
            assert row["as_stored"] < row["moved"] == 1.0
    by_name = {row["channel"]: row for row in found["channels"]}
    for name, row in by_name.items():
        own = [layer["moved"] for layer in found["layers"] if layer["channel"] == name]
        assert row["moved"] == pytest.approx(sum(own) / len(own))


def test_too_little_to_compare_is_refused():
    with pytest.raises(ValueError, match="two blocks"):
        roc(family("llama_mqa"), words(1, 200), blocks=1)
    with pytest.raises(ValueError, match="200 tokens of text, 215 are needed"):
        roc(family("llama_mqa"), words(1, 200), blocks=32, tokens=4, room=100)
    with pytest.raises(ValueError, match="more than 32"):
        sink(family("llama_mqa"), words(1, 200), chunk=32)
    with pytest.raises(ValueError, match="give a longer one"):
        sink(family("llama_mqa"), words(1, 60), chunk=48, room=100)


@functools.cache
def one_layer() -> HfEngine:
    config = LlamaConfig(
        vocab_size=140,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    tiny.randomise(model, 1)
    return HfEngine(model)


def test_attention_masses_are_those_of_a_prefill_of_the_whole_prompt():
    engine, ids = family("llama_mqa"), words(2, 400)
    row = sink(engine, ids, chunk=40, room=100, samples=1)["rows"][-1]
    at = row["position"]
    assert at == 87
    whole = torch.cat([ids[:at], ids[at + 13 + 64 - 13 :][:40]])  # the chunk is behind the displaced text
    model = engine.model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = model(input_ids=whole[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    rows = torch.stack([layer[0, :, at + 32 :].double() for layer in layers])
    assert row["S"] == pytest.approx(float(rows[..., :32].sum(-1).mean()), rel=1e-5)
    own = rows[..., at:]
    assert row["W"] == pytest.approx(float((own[..., :32].sum(-1) / own.sum(-1)).mean()), rel=1e-5)


def test_both_masses_are_one_thing_at_the_prompts_start():
    found = sink(family("deepseek_v3"), words(2, 400), chunk=40, room=100, samples=2)
    assert found["rows"][0]["W"] == pytest.approx(found["rows"][0]["S"])
    assert [row["position"] for row in found["rows"]] == [0, 32, 50, 87]
    assert found["rows"][0]["S"] > found["rows"][-1]["S"]


def test_keys_that_are_rotated_back_are_attended_to_as_before():
    for row in sink(one_layer(), words(2, 400), chunk=40, room=100, samples=1)["rows"][2:]:
        assert row["S_moved"] == pytest.approx(row["S"], rel=1e-4)  # a layer that nothing precedes
        assert abs(row["S_stored"] - row["S"]) > 1e-3 * row["S"]


def test_the_model_is_as_it_was_behind_a_look_at_its_attention():
    engine = family("llama_mqa")
    before = engine.checked_fingerprint()
    sink(engine, words(2, 400), chunk=40, room=64, samples=1)
    assert engine.checked_fingerprint() == before
    assert engine.model.config._attn_implementation == "sdpa"


def test_a_chunk_out_of_the_store_runs_nothing_and_its_miss_runs_it_twice(tmp_path):
    found = breakeven(family("llama_mqa"), words(3, 200), tokens=100, rounds=1, folder=tmp_path)
    rows = {row["form"]: row for row in found["rows"]}
    assert [*rows] == ["as-is", "int8", "int4"]
    for row in rows.values():
        assert (row["miss_tokens"], row["hit_tokens"]) == (200, 0)
        assert row["invested"] == pytest.approx(row["miss"] - row["prefill"])
        assert row["saved"] == pytest.approx(row["prefill"] - row["hit"])
        assert row["f_star"] == repaid(row["invested"], row["saved"])
        assert row["f_star_tokens"] == 1.0
        assert row["read"] > 0
    assert rows["as-is"]["bytes"] > rows["int8"]["bytes"] > rows["int4"]["bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="172 are needed"):
        breakeven(family("llama_mqa"), words(3, 60), tokens=100)


def test_what_saves_nothing_is_never_repaid():
    assert repaid(6.0, 2.0) == 3.0
    assert repaid(-1.0, 2.0) == 0.0
    assert repaid(6.0, 0.0) is None


def test_the_verbs_that_run_a_model(capsys):
    small = ["--room", 80, "-q", "--format", "json"]
    found = kamera(capsys, "analyze", "roc", "testbed", "--blocks", 2, *small).document
    assert (found["model"], found["trace"], len(found["layers"])) == ("testbed", "example", 12)
    rows = kamera(capsys, "analyze", "sink", "testbed", "--chunk", 40, "--samples", 1, *small).document[
        "rows"
    ]
    assert rows[0]["S_moved"] is None and rows[-1]["S_moved"] > 0
    done = kamera(
        capsys, "analyze", "breakeven", "testbed", "--tokens", 64, "--rounds", 1, "--kv", "int8", "-q"
    )
    assert done.code == 0 and "int8" in done.out and "invested" in done.out
    assert kamera(capsys, "analyze", "breakeven", "testbed", "--kv", "int9").code == 2
