"""Many requests of several tenants in few pages: chunked, with slides, recalls and lost objects."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import Recipe
from kamera.engines.hf import HfEngine
from kamera.engines.vllm.serving import FIELD, recipe_of
from kamera.store import StoreAdmin
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

POLICY = ReusePolicy(forms="always", rank=512, patch_bytes=None)
TENANTS = ("red", "green", "blue", "gray")


PRESSED = {
    "num_gpu_blocks_override": 44,  # four requests of sixteen find pages
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
    "disable_log_stats": False,
    **PICTURES,
}
TOKENS = 40  # more than a page: an answer needs another while it is decoded


class Asked(NamedTuple):
    """A prompt of a tenant, and its recipe in JSON if it has one."""

    tenant: str
    recipe: Recipe | None
    given: dict[str, Any]

    @property
    def shown(self) -> str | None:
        return None if self.recipe is None else self.recipe.to_json()


def questions(backbone: HfEngine, store: ChunkStore, tenant: str) -> Iterator[Asked]:
    """Questions of a tenant behind windows that slid and recalled, all of which is stored."""
    episode = World(800_000).episode(700, layout="LLLI")  # of all tenants the same: only salts part them
    chunks = [backbone.chunk(frame.content) for frame in episode.frames]
    tail = backbone.builder.seams(None).tail
    for order in ([0, 1, 2, 3], [1, 2, 3], [2, 0, 3], [2, 1, 0, 3]):
        for again in (False, True):
            window = KameraWindow(backbone, store, policy=POLICY)
            for i in order:
                window.append(chunks[i])
            if not again:
                window.slide(len(order))
                window.flush()
        recipe = window.recipe()
        for question in bound(episode, order)[:2]:
            ids = [*recipe.ids, *backbone.builder.question_ids(question.text, tail).tolist()]
            images, names = [episode.frames[i].image for i in order], [chunks[i].id for i in order]
            yield Asked(tenant, recipe, prompt(ids, images, names, tenant))


def answers(llm: Any, asked: Sequence[Asked], cold: bool = False) -> list[Any]:
    given = [{**one.given, "cache_salt": "cold"} if cold else one.given for one in asked]
    return llm.generate(
        given, [greedy(None if cold else one.shown, TOKENS, stops=False) for one in asked], use_tqdm=False
    )


def wrong(cold: Sequence[Any], served: Sequence[Any]) -> list[int]:
    return [i for i, (one, other) in enumerate(zip(cold, served, strict=True)) if apart(one, other) > 1e-3]


def preemptions(llm: Any) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def test_requests_of_four_tenants_in_few_pages_are_right_leak_nothing_and_meet_no_foreign_kv(tmp_path):
    model = pictures_directory(tmp_path / "model")
    backbone, draw = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine, random.Random(1)
    llm = start(model, tmp_path / "store", {"harvest": "64MiB"}, **PRESSED)
    scheduler = scheduler_of(llm)
    pool, side = scheduler.kv_cache_manager.block_pool, scheduler.connector.scheduler
    free = pool.get_num_free_blocks()
    stores = [ChunkStore.open(tmp_path / "store", tenant=tenant) for tenant in TENANTS]
    asked = [one for store in stores for one in questions(backbone, store, store.tenant)]
    asked += [one._replace(recipe=None) for one in draw.sample(asked, 8)]
    asked = [one for one in asked for _ in range(2)][:64]
    draw.shuffle(asked)
    assert len(asked) == 64
    cold = answers(llm, asked, cold=True)
    # half of the objects of one tenant go while the scheduler knows their rows
    for one in asked:
        if one.recipe is not None and one.tenant == TENANTS[0]:
            params = {FIELD: one.shown}
            side.rows.count_stored("seen", recipe_of(params, one.recipe.ids, one.tenant, side.identity.model))
    for info in stores[0].ls("canonical")[::2]:
        StoreAdmin(stores[0]).delete(info.key)
    before = preemptions(llm)
    assert wrong(cold, answers(llm, asked)) == []
    assert side.counts.of("supplied_tokens") > 2000 and side.counts.all["refused_requests/load"] > 0
    assert preemptions(llm) > before
    llm.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free
    # a tenant that has stored nothing is supplied nothing
    supplied = side.counts.of("supplied_tokens")
    one = next(one for one in asked if one.recipe is not None)
    foreign = one._replace(given={**one.given, "cache_salt": "white"})
    assert answers(llm, [foreign])[0].num_cached_tokens == 0
    assert side.counts.of("supplied_tokens") == supplied
    # the engine ends with requests in its pages, and another one goes on from the store
    for i, one in enumerate(asked):
        llm.llm_engine.add_request(f"cut {i}", one.given, greedy(one.shown, TOKENS, stops=False))
    for _ in range(20):
        llm.llm_engine.step()
    assert scheduler.running
    llm.llm_engine.engine_core.shutdown()
    del llm, scheduler, pool, side
    llm = start(model, tmp_path / "store", {"harvest": "64MiB"}, **PRESSED)
    assert wrong(cold, answers(llm, asked)) == []
    again = scheduler_of(llm)
    assert again.connector.scheduler.counts.of("supplied_tokens") > 2000
    llm.reset_prefix_cache()
    assert again.kv_cache_manager.block_pool.get_num_free_blocks() == free
