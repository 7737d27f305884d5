"""Adapters in one engine: what is stored under one is served under that one alone."""

from __future__ import annotations

import json
import logging
import os
import time

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from vllm.lora.request import LoRARequest

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.engines import checkpoint_fingerprint
from kamera.engines.vllm.clients import Offline
from kamera.testbed import World
from kamera.window import EngineWindow
from tests.engines.vllm.engine import (
    IMAGE,
    PICTURES,
    apart,
    bound,
    greedy,
    pictures_directory,
    prompt,
    scheduler_of,
    start,
)

POLICY = ReusePolicy(rank=512, patch_bytes=None)
RANK = 8


def adapter(folder, layers, seed):
    """An adapter of the testbed's attention that changes its keys and values."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, out in (("k_proj", 128), ("v_proj", 128)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, 256, generator=draw) / 16
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) / 16
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where = tmp_path_factory.mktemp("bed")
    model = pictures_directory(where / "model")
    layers = json.loads((model / "config.json").read_text())["text_config"]["num_hidden_layers"]
    folders = [adapter(where / name, layers, seed) for seed, name in enumerate(("one", "two", "late"))]
    harvest = {"harvest": "256MiB", "rank": 512, "patch_bytes": None}
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    llm = start(model, where / "store", harvest, **lora, **PICTURES)
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    return llm, backbone, ChunkStore.open(where / "store"), model, folders


def requests(folders):
    return [None, *(LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(folders))]


def window(bed, adapter, frames):
    """A window of ``frames`` under an adapter, all of which the engine has stored."""
    llm, backbone, store, model, _ = bed
    folders = [] if adapter is None else [adapter.lora_path]
    named = checkpoint_fingerprint(model, dtype="float32", adapters=folders)
    engine = Offline(llm, [IMAGE], adapter=adapter)
    made = EngineWindow(engine, backbone, store, fingerprint=named, policy=POLICY)
    for frame in frames:
        made.append(frame.content)
    made.generate("What?", 1)
    made.keep()
    for _ in range(100):
        if {slot.origin for slot in made.look()} <= {"canonical", "stored"}:
            return made
        time.sleep(0.1)
    raise AssertionError([slot.origin for slot in made.slots])


def asked(bed, episode, adapter, recipe=None, salt=""):
    """The engine's answer behind the episode's frames under an adapter."""
    llm, backbone, *_ = bed
    chunks = [backbone.chunk(frame.content) for frame in episode.frames]
    seams = backbone.builder.seams(None)
    ids = [*backbone.builder.anchor_ids(None).tolist(), *(i for c in chunks for i in c.input_ids.tolist())]
    ids += backbone.builder.question_ids(bound(episode)[0].text, seams.tail).tolist()
    images, names = [frame.image for frame in episode.frames], [chunk.id for chunk in chunks]
    (out,) = llm.generate(
        [prompt(ids, images, names, salt)], greedy(recipe), use_tqdm=False, lora_request=adapter
    )
    return out


def test_each_adapter_is_served_what_was_stored_under_it_and_nothing_else(bed):
    base, one, two, _ = requests(bed[4])
    episode = World(800_000).episode(3, layout="LLLI")
    side = scheduler_of(bed[0]).connector.scheduler
    cold = {id(who): asked(bed, episode, who, salt="cold") for who in (base, one, two)}
    assert apart(cold[id(base)], cold[id(one)]) > 0.01 and apart(cold[id(one)], cold[id(two)]) > 0.01
    recipes = {id(who): window(bed, who, episode.frames).recipe() for who in (base, one)}
    prints = {recipe.context.fingerprint for recipe in recipes.values()}
    assert len(prints) == 2
    for who in (base, one):
        assert scheduler_of(bed[0]).kv_cache_manager.reset_prefix_cache()  # what is exact stands there, too
        before = side.counts.of("supplied_tokens")
        served = asked(bed, episode, who, recipes[id(who)].to_json())
        assert side.counts.of("supplied_tokens") - before > 200
        assert served.outputs[0].token_ids == cold[id(who)].outputs[0].token_ids
        assert apart(served, cold[id(who)]) < 2e-5
    refused, supplied = side.counts.of("refused_requests"), side.counts.of("supplied_tokens")
    for whose, who in ((base, one), (one, base), (base, two), (one, two)):
        served = asked(bed, episode, who, recipes[id(whose)].to_json())
        assert apart(served, cold[id(who)]) < 2e-5
    assert (side.counts.of("refused_requests"), side.counts.of("supplied_tokens")) == (refused + 4, supplied)


def test_a_prompt_without_a_recipe_is_answered_under_its_adapter(bed):
    base, one, *_ = requests(bed[4])
    episode = World(800_000).episode(4, layout="LLLI")
    cold = asked(bed, episode, one, salt="cold")
    window(bed, base, episode.frames)
    assert apart(asked(bed, episode, one), cold) < 2e-5


def test_an_adapter_that_changed_since_the_engine_started_is_refused(bed, caplog):
    late = requests(bed[4])[3]
    episode = World(800_000).episode(5, layout="LLLI")
    cold = asked(bed, episode, late, salt="cold")
    recipe = window(bed, late, episode.frames).recipe().to_json()
    weights = bed[4][2] / "adapter_model.safetensors"
    os.utime(weights)
    side = scheduler_of(bed[0]).connector.scheduler
    supplied = side.counts.of("supplied_tokens")
    with caplog.at_level(logging.WARNING, "kamera"):
        served = asked(bed, episode, late, recipe)
    assert "adapter 'late'" in caplog.text and side.counts.of("supplied_tokens") == supplied
    assert apart(served, cold) < 2e-5
