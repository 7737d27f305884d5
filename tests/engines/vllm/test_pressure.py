"""Many requests of several tenants in few pages: chunked, with slides, recalls and lost objects."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.vllm.serving import FIELD, asked_of
from kamera.store.admin.admin import StoreAdmin
from kamera.testbed import World
from tests.engines.vllm.engine import (
    PICTURES,
    apart,
    bound,
    greedy,
    pictures_directory,
    prompt,
    scheduler_of,
    start,
)

POLICY = ReusePolicy(certified=False, tolerance=None, forms="always", rank=512, patch_bytes=None)
TENANTS = ("red", "green", "blue", "gray")


def test_requests_of_four_tenants_in_few_pages_are_right_leak_nothing_and_meet_no_foreign_kv(tmp_path):
    model = pictures_directory(tmp_path / "model")
    backbone, draw = Backbone.from_pretrained(model, dtype="float32"), random.Random(1)
    settings = {
        "num_gpu_blocks_override": 44,
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
        **PICTURES,
    }
    llm = start(model, tmp_path / "store", {"harvest": "64MiB"}, **settings)
    scheduler = scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    free, asked, stores = pool.get_num_free_blocks(), [], []
    for tenant in TENANTS:
        episode = World(800_000).episode(700, layout="LLLI")  # of all tenants the same: only salts part them
        store = ChunkStore.open(tmp_path / "store", tenant=tenant)
        stores.append(store)
        chunks = [backbone.chunk(frame.content) for frame in episode.frames]
        for order in ([0, 1, 2, 3], [1, 2, 3], [2, 0, 3], [2, 1, 0, 3]):  # slides and recalls
            for again in (False, True):
                window = KameraWindow(backbone, store, policy=POLICY)
                for i in order:
                    window.append(chunks[i])
                if not again:
                    window.slide(len(order))
                    window.flush()
            recipe, tail = window.recipe(), backbone.seams(None).tail
            for question in bound(episode, order)[:2]:
                ids = [*recipe.ids, *backbone.question_ids(question.text, tail).tolist()]
                images, names = [episode.frames[i].image for i in order], [chunks[i].id for i in order]
                asked.append((tenant, recipe, prompt(ids, images, names, tenant), question.answer))
    asked += [(tenant, None, given, answer) for tenant, _, given, answer in draw.sample(asked, 8)]
    asked = [one for one in asked for _ in range(2)][:64]
    draw.shuffle(asked)
    assert len(asked) == 64
    cold = llm.generate(
        [{**g, "cache_salt": "cold"} for _, _, g, _ in asked], greedy(tokens=12), use_tqdm=False
    )
    # half of the objects of one tenant go while the scheduler knows their rows
    side = scheduler.connector.scheduler
    for tenant, recipe, _, _ in asked:
        if recipe is not None and tenant == TENANTS[0]:
            side.rows.stored(
                "seen", asked_of({FIELD: recipe.to_json()}, recipe.ids, tenant, side.fingerprint)
            )
    for info in stores[0].ls("canonical")[::2]:
        StoreAdmin(stores[0]).delete(info.key)
    sampling = [greedy(None if recipe is None else recipe.to_json(), 12) for _, recipe, _, _ in asked]
    served = llm.generate([g for _, _, g, _ in asked], sampling, use_tqdm=False)
    wrong = [i for i, (one, other) in enumerate(zip(cold, served, strict=True)) if apart(one, other) > 1e-3]
    assert wrong == []
    assert side.counts.supplied_tokens > 2000 and side.counts.failed_loads > 0
    llm.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free
    # a tenant that has stored nothing is supplied nothing
    before = side.counts.supplied_tokens
    _, recipe, given, _ = next(one for one in asked if one[1] is not None)
    foreign = llm.generate([{**given, "cache_salt": "white"}], greedy(recipe.to_json(), 12), use_tqdm=False)
    assert side.counts.supplied_tokens == before
    assert foreign[0].num_cached_tokens == 0
