"""Recipes of picture windows in vLLM's pages: GQA with M-RoPE, an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.engines.vllm.clients import Offline
from kamera.engines.vllm.serving import FIELD, recipe_of
from kamera.ops import kv_distance, kv_map
from kamera.store import CanonicalRecord, StoreAdmin
from kamera.testbed import World
from kamera.window import EngineWindow
from tests.engines.vllm.engine import (
    PICTURES,
    apart,
    ask,
    bound,
    greedy,
    pictures_directory,
    prompt,
    scheduler_of,
    start,
)

FULL = ReusePolicy(forms="always", rank=512, patch_bytes=None)
DEFAULT = ReusePolicy(forms="always")
BLIND = ReusePolicy(on_miss="blind")
HELD_OUT = World(800_000)


class Bed(NamedTuple):
    """An engine and a backbone of the same weights, on one directory."""

    llm: Any
    backbone: HfEngine
    store: ChunkStore
    where: Any

    @property
    def side(self) -> Any:
        return scheduler_of(self.llm).connector.scheduler

    @property
    def counts(self) -> Any:
        return self.side.counts

    def ids(self, window: KameraWindow, question: str) -> list[int]:
        """Token ids of a whole prompt."""
        tail = self.backbone.builder.seams(None).tail
        return [*window.recipe().ids, *self.backbone.builder.question_ids(question, tail).tolist()]


class Item(NamedTuple):
    """A question behind a window, answered by the engine without Kamera, with it, and by the library."""

    wanted: str
    cold: Any
    served: Any
    ours: str


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where = tmp_path_factory.mktemp("store")
    model = pictures_directory(tmp_path_factory.mktemp("model"))
    llm = start(model, where, {"harvest": "256MiB"}, scheduling_policy="priority", **PICTURES)
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    return Bed(llm, backbone, ChunkStore.open(where), where)


def stored(bed: Bed, frames: Sequence[Any], policy: ReusePolicy) -> KameraWindow:
    """A window of chunks that another one has left in the store."""
    chunks = [bed.backbone.chunk(frame.content) for frame in frames]
    first = KameraWindow(bed.backbone, bed.store, policy=policy)
    for chunk in chunks:
        first.append(chunk)
    first.slide(len(chunks))
    first.flush()
    window = KameraWindow(bed.backbone, bed.store, policy=policy)
    for chunk in chunks:
        window.append(chunk)
    assert window.recipe().missing == ()
    return window


def items(bed: Bed, episodes: range, policy: ReusePolicy, questions: int) -> list[Item]:
    """Questions whose answers other frames determine, asked with and without the recipe of their window."""
    found = []
    for number in episodes:
        episode = HELD_OUT.episode(number, layout="LLLI")
        window, images = stored(bed, episode.frames, policy), [frame.image for frame in episode.frames]
        names, recipe = [slot.chunk_id for slot in window.slots], window.recipe().to_json()
        asked = bound(episode)[:questions]
        prompts = [prompt(bed.ids(window, q.text), images, names) for q in asked]
        cold = bed.llm.generate([{**p, "cache_salt": "cold"} for p in prompts], greedy(), use_tqdm=False)
        served = bed.llm.generate(prompts, greedy(recipe), use_tqdm=False)
        for question, one, other in zip(asked, cold, served, strict=True):
            assert list(one.prompt_token_ids) == bed.ids(window, question.text)
            assert other.num_cached_tokens >= len(window.recipe().ids) - 32
            found.append(Item(question.answer, one, other, window.generate(question.text, max_new_tokens=4)))
    return found


def share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def text(out: Any) -> str:
    return out.outputs[0].text


def test_full_rank_patches_and_leading_chunks_give_the_engines_own_answers(bed):
    asked = items(bed, range(25), FULL, 4)
    assert len(asked) >= 100
    assert all(i.served.outputs[0].token_ids == i.cold.outputs[0].token_ids for i in asked)
    assert max(apart(i.cold, i.served) for i in asked) <= 2e-5
    assert share([text(i.cold) == i.wanted for i in asked]) >= 0.95


def test_default_patches_answer_as_the_library_and_blind_reuse_does_not(bed):
    patched = items(bed, range(100, 110), DEFAULT, 4)
    assert share([text(i.served) == i.ours for i in patched]) >= 0.95
    assert share([text(i.served) == i.wanted for i in patched]) >= 0.95
    blind = items(bed, range(200, 210), BLIND, 4)
    assert share([text(i.served) == i.wanted for i in blind]) <= 0.1
    assert share([text(i.served) == i.ours for i in blind]) >= 0.95


def test_a_window_in_another_order_is_turned(bed):
    episode = HELD_OUT.episode(300, layout="LLLI")
    order = [2, 0, 1, 3]
    window = stored(bed, [episode.frames[i] for i in order], FULL)
    question = bound(episode, order)[0]
    images = [episode.frames[i].image for i in order]
    given = prompt(bed.ids(window, question.text), images, [s.chunk_id for s in window.slots])
    served = ask(bed.llm, given, window.recipe().to_json())
    cold = ask(bed.llm, {**given, "cache_salt": "cold"})
    assert apart(cold, served) <= 2e-5 and text(served) == question.answer


def test_pictures_in_the_supplied_span_are_not_encoded(bed):
    window = stored(bed, HELD_OUT.episode(301, layout="LLLI").frames, DEFAULT)
    images = [frame.image for frame in HELD_OUT.episode(301, layout="LLLI").frames]
    ids, names = bed.ids(window, "value of tag A?"), [slot.chunk_id for slot in window.slots]
    before = bed.side.encodes
    ask(bed.llm, prompt(ids, images, names), window.recipe().to_json())
    assert bed.side.encodes == before
    ask(bed.llm, prompt(ids, images, [f"{name}/cold" for name in names], "cold"))
    assert bed.side.encodes == before + 4


def poisoned(bed: Bed, episodes: range) -> list[bool]:
    """Whether requests without a recipe answer otherwise after one of the same tokens was served blind."""
    wrong = []
    for number in episodes:
        episode = HELD_OUT.episode(number, layout="LLLI")
        window, question = stored(bed, episode.frames, BLIND), bound(episode)[0]
        images, names = [f.image for f in episode.frames], [slot.chunk_id for slot in window.slots]
        given = prompt(bed.ids(window, question.text), images, names)
        clean = ask(bed.llm, {**given, "cache_salt": "cold"})
        ask(bed.llm, given, window.recipe().to_json())
        wrong.append(apart(clean, ask(bed.llm, given)) > 1e-3 or text(clean) != text(ask(bed.llm, given)))
    return wrong


@pytest.mark.parametrize(
    "episodes", [range(400, 420), pytest.param(range(3000, 3200), marks=pytest.mark.slow)], ids=len
)
def test_with_a_salt_nobody_reads_blind_pages(bed, episodes):
    assert not any(poisoned(bed, episodes))


def test_equal_recipes_share_pages(bed):
    window = stored(bed, HELD_OUT.episode(302, layout="LLLI").frames, DEFAULT)
    images = [frame.image for frame in HELD_OUT.episode(302, layout="LLLI").frames]
    given = prompt(bed.ids(window, "value of tag A?"), images, [slot.chunk_id for slot in window.slots])
    first = ask(bed.llm, given, window.recipe().to_json())
    before = bed.counts.of("supplied_tokens")
    second = ask(bed.llm, given, window.recipe().to_json())
    assert bed.counts.of("supplied_tokens") - before < 32  # the part of a block at its end
    assert apart(first, second) <= 1e-6


def test_a_recipe_of_another_prompt_is_refused_and_the_request_computed(bed):
    window = stored(bed, HELD_OUT.episode(303, layout="LLLI").frames, BLIND)
    images = [frame.image for frame in HELD_OUT.episode(303, layout="LLLI").frames]
    names, before = [slot.chunk_id for slot in window.slots], bed.counts.of("refused_requests")
    ids = bed.ids(window, "value of tag A?")
    other = [ids[0], ids[1] + 1, *ids[2:]]
    cold = ask(bed.llm, prompt(other, images, names, "cold"))
    assert apart(cold, ask(bed.llm, prompt(other, images, names), window.recipe().to_json())) <= 1e-6
    foreign = ask(bed.llm, prompt(ids, images, names, "another tenant"), window.recipe().to_json())
    assert apart(ask(bed.llm, prompt(ids, images, names, "cold")), foreign) <= 1e-6
    assert bed.counts.of("refused_requests") == before + 2


def served_without(bed: Bed, lost: int) -> tuple[Item, int]:
    """A question behind a blind window of which one object goes after its rows were seen; loads that fail."""
    episode = HELD_OUT.episode(310 + lost, layout="LLLI")
    window, question = stored(bed, episode.frames, BLIND), bound(episode)[0]
    images, names = [f.image for f in episode.frames], [slot.chunk_id for slot in window.slots]
    given, recipe = prompt(bed.ids(window, question.text), images, names), window.recipe()
    side = scheduler_of(bed.llm).connector.scheduler
    params = {FIELD: recipe.to_json()}
    seen = recipe_of(params, bed.ids(window, question.text), "", side.identity.model)
    assert side.rows.count_stored("before", seen) == 4
    StoreAdmin(bed.store).delete(recipe.parts[lost].kv.key)
    before = bed.counts.all["refused_requests/load"]
    served = ask(bed.llm, given, recipe.to_json())
    cold = ask(bed.llm, {**given, "cache_salt": "cold"})
    return Item(question.answer, cold, served, ""), bed.counts.all["refused_requests/load"] - before


@pytest.mark.parametrize("lost", [0, 2])
def test_a_load_that_fails_is_computed_as_if_there_were_no_kamera(bed, lost):
    item, failed = served_without(bed, lost)
    assert failed == 1
    assert text(item.served) == text(item.cold) == item.wanted and apart(item.cold, item.served) <= 2e-5


def harvested(bed: Bed, chunk_id: str) -> Any:
    """The canonical that the engine stores in a thread of its own."""
    for _ in range(100):
        for info in ChunkStore.open(bed.where).ls("canonical", chunk_id=chunk_id):
            return ChunkStore.open(bed.where).get_canonical(info.context, chunk_id)
        time.sleep(0.1)
    raise AssertionError("nothing was harvested")


def engine_window(bed: Bed) -> EngineWindow:
    engine = Offline(bed.llm, bed.backbone.builder.vision_tokens)
    policy = ReusePolicy()
    return EngineWindow(engine, bed.backbone, bed.store, fingerprint=bed.backbone.fingerprint, policy=policy)


def read_back(bed: Bed) -> tuple[CanonicalRecord, CanonicalRecord]:
    """A canonical that the engine computed, and the model's own."""
    chunk = bed.backbone.chunk(HELD_OUT.episode(500, layout="LLLI").frames[0].content)
    window = engine_window(bed)
    window.append(HELD_OUT.episode(500, layout="LLLI").frames[0].content)
    window.generate("value of tag A?", 1)
    mine = harvested(bed, chunk.id)
    store = ChunkStore.open("memory://")
    window = KameraWindow(bed.backbone, store, policy=FULL)
    window.append(chunk)
    window.slide()
    window.flush()
    return mine, store.get_canonical(store.ls("canonical")[0].context, chunk.id)


def test_what_the_engine_computed_is_what_the_model_computes(bed):
    mine, theirs = read_back(bed)
    assert torch.equal(mine.positions, theirs.positions) and torch.equal(mine.input_ids, theirs.input_ids)
    assert {n: t.tolist() for n, t in mine.inputs.items()} == {
        n: t.tolist() for n, t in theirs.inputs.items()
    }
    assert mine.outline == replace(theirs.outline, media=(mine.chunk_id,))
    assert kv_distance(mine.kv, kv_map(theirs.kv, lambda t: t)) <= 1e-5


def settled(bed: Bed, window: EngineWindow, origins: set[str]) -> None:
    """Wait until what the engine has computed is stored, the canonical of each chunk, too."""
    for _ in range(100):
        kept = [bed.store.has(window.recipe().context, slot.chunk_id) for slot in window.slots]
        if {slot.origin for slot in window.look()} <= origins and all(kept):
            return
        time.sleep(0.1)
    raise AssertionError([slot.origin for slot in window.slots])


ORIGINS = [
    ["computed"] * 4,
    ["canonical", "stored", "stored", "stored"],
    ["canonical", "survivor", "survivor"],
    ["canonical", "survivor", "survivor", "computed", "computed"],
    ["canonical", "survivor", "survivor", "stored", "stored"],
]
"""Where the chunks come from at each question of `engine_session`."""


class Session(NamedTuple):
    """Origins of the chunks at each question, whether it was answered right, and what the window counted."""

    origins: list[list[str]]
    right: list[bool]
    usage: Any


def engine_session(bed: Bed, number: int) -> Session:
    """Pictures come, are stored, leave and come, with a question after each change."""
    episode, window, shown = HELD_OUT.episode(number, layout="LLLILI"), engine_window(bed), [0, 1, 2, 3]
    done = Session([], [], window.usage)

    def answer() -> None:
        question = bound(episode, shown)[0]
        said = window.generate(question.text, 4)
        done.origins.append([slot.origin for slot in said.slots])
        done.right.append(said.text == question.answer)

    for frame in episode.frames[:4]:
        window.append(frame.content)
    answer()
    window.keep()
    settled(bed, window, {"canonical", "stored"})
    answer()
    window.slide()
    shown.pop(0)
    answer()
    for i in (4, 5):
        window.append(episode.frames[i].content)
        shown.append(i)
    answer()
    assert window.keep() == 2
    settled(bed, window, {"canonical", "survivor", "stored"})
    answer()
    window.evict(1)
    window.generate("value of tag A?", 1)
    return done


def test_a_window_over_the_engine_answers_from_what_the_engine_alone_has_stored(bed):
    before = bed.side.encodes
    sessions = [engine_session(bed, number) for number in range(600, 605)]
    assert all(done.origins == ORIGINS for done in sessions)
    for now, later in (session.usage() for session in sessions):
        assert 6 <= now.forwards <= 21 and 5 <= later.forwards <= 6  # an answer is of one to four tokens
    assert share([right for done in sessions for right in done.right]) >= 0.95
    assert bed.side.encodes - before == 5 * 6  # each picture once: no operation encodes again
