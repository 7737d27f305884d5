"""The store by which recognising prompts is measured: its prompts are recognised whole, among all rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kamera import testbed
from kamera.engines import Placeholder
from kamera.engines.hf import HfEngine
from kamera.engines.vllm.known import KnownPrompts
from lab import recognised_prompts
from lab.recognised_prompts import RANKS, Clock, Filled


def test_a_prompt_of_the_store_is_recognised_whole(tmp_path, monkeypatch):
    for name, value in (("CHUNKS", 4), ("PROMPTS", 2), ("POOL", 6), ("TEXT", 20)):
        monkeypatch.setattr(recognised_prompts, name, value)
    model, processor = testbed.load()
    filled = Filled(tmp_path, HfEngine(model, processor))
    filled.fill(60)
    table = KnownPrompts(RANKS, filled.store.ls())
    assert len(filled.store.ls()) == 60 and table.rows >= 6 + 2 * 3 + 20
    for names in filled.prompts:
        ids, media = list(filled.window.recipe().anchor_ids), []
        for name in names:
            own = filled.pool[name].input_ids.tolist()
            if filled.pool[name].inputs:
                run = [i for i, token in enumerate(own) if own.count(token) > len(own) // 2]
                media.append(Placeholder(len(ids) + run[0], len(run), name))
            ids += own
        recipe = table.recipe(filled.context.fingerprint, np.array([*ids, 20]), media, "patched")
        assert [part.chunk_id for part in recipe.parts] == names
        assert [part.guarantee for part in recipe.parts] == ["exact", *["patched"] * 3]


def test_a_clock_adds_up_the_calls_of_a_request():
    clock, request = Clock(), SimpleNamespace(request_id="r")
    connector = SimpleNamespace(**{method: (lambda *given: 7) for method in recognised_prompts.METHODS})
    for method in recognised_prompts.METHODS:
        clock.watch(connector, method)
    assert connector.on_new_request(request) == connector.get_num_new_matched_tokens(request, 0) == 7
    connector.get_num_new_matched_tokens(request, 0), connector.update_state_after_alloc(request)
    table = clock.table()
    assert [table[m]["calls"] for m in recognised_prompts.METHODS] == [1, 2, 1]
    assert table["a request, together"]["calls"] == 1
    together = table["a request, together"]["wall_p99_ms"]
    assert together >= max(table[m]["wall_p99_ms"] for m in recognised_prompts.METHODS)
