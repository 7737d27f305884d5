"""Prompts without a recipe in vLLM's pages: recognised, they answer as a cold engine does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.ops import PatchBudget
from kamera.store import StoreAdmin
from kamera.window import former_of
from tests.engines.vllm.engine import (
    PICTURES,
    apart,
    ask,
    bound,
    pictures_directory,
    prompt,
    scheduler_of,
    start,
)
from tests.engines.vllm.test_pictures import FULL, HELD_OUT, Bed, stored, text

CONFIGURED = {"harvest": "256MiB", "recognise": "survivor", "rank": 512, "patch_bytes": None}


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where = tmp_path_factory.mktemp("store")
    model = pictures_directory(tmp_path_factory.mktemp("model"))
    llm = start(model, where, CONFIGURED, **PICTURES)
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    return Bed(llm, backbone, ChunkStore.open(where), where)


def read(bed: Bed, tenant: str = "") -> None:
    """Have the rows of a tenant's store read again."""
    tables = scheduler_of(bed.llm).connector.scheduler.tables
    tables.of(tenant)
    mine = tables._tenants[tenant]
    if mine.future is None:
        mine.next_look = 0.0
        tables.of(tenant)
    mine.future.result(60)
    tables.of(tenant)


class Scene:
    """A window that is stored, and a question behind it as a prompt without a recipe."""

    def __init__(self, bed: Bed, number: int, policy: ReusePolicy = FULL) -> None:
        episode = HELD_OUT.episode(number, layout="LLLI")
        self.window = stored(bed, episode.frames, policy)
        self.question = bound(episode)[0]
        self.ids = bed.ids(self.window, self.question.text)
        self.images = [frame.image for frame in episode.frames]
        self.names = [slot.chunk_id for slot in self.window.slots]
        self.tokens = len(self.window.recipe().ids)
        read(bed)

    def plain(self, tenant: str = "", ids: Sequence[int] | None = None) -> dict[str, Any]:
        return prompt(self.ids if ids is None else ids, self.images, self.names, tenant)


def supplied(bed: Bed, given: dict[str, Any]) -> tuple[Any, int]:
    """An answer without a recipe, and the tokens that the store supplied to it."""
    before = bed.counts.of("supplied_tokens")
    out = ask(bed.llm, given)
    return out, bed.counts.of("supplied_tokens") - before


def same(one: Any, other: Any) -> bool:
    return one.outputs[0].token_ids == other.outputs[0].token_ids and apart(one, other) <= 2e-5


def test_a_recognised_prompt_answers_as_a_cold_engine_without_an_encode(bed):
    for number in range(4000, 4010):
        scene, encodes = Scene(bed, number), bed.side.encodes
        served, tokens = supplied(bed, scene.plain())
        assert tokens == scene.tokens and bed.side.encodes == encodes
        assert text(served) == scene.question.answer
        again, tokens = supplied(bed, scene.plain())
        assert tokens < 32 and same(served, again)  # it shares its own pages
        told, tokens = supplied(bed, scene.plain(tenant="cold"))
        assert tokens == 0 and same(served, told)


def poisoned(bed: Bed, numbers: range) -> list[bool]:
    """Whether requests that may be served exact KV alone answer otherwise after one that was served less."""
    tables, wrong = scheduler_of(bed.llm).connector.scheduler.tables, []
    for number in numbers:
        scene = Scene(bed, number, ReusePolicy(forms="always"))
        side = scheduler_of(bed.llm).connector.scheduler
        side.tables = _coarse(tables)
        _, tokens = supplied(bed, scene.plain())
        assert tokens > scene.tokens // 2
        side.tables, least, tables.least = tables, tables.least, "exact"
        plain = ask(bed.llm, scene.plain())
        tables.least = least
        wrong.append(apart(plain, ask(bed.llm, scene.plain("cold"))) > 1e-3)
    return wrong


def _coarse(tables: Any) -> Any:
    """Tables by which patches of low rank are served: what equals a prefill least."""
    made = type(tables)(tables._stores, PatchBudget(4, 0.03), tables.least, tables.block)
    made.of("")
    made._tenants[""].future.result(60)
    made.of("")
    return made


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_no_other_prompt_meets_pages_of_a_recognised_one(bed, count):
    assert poisoned(bed, range(50 * count, 51 * count)) == [False] * count


def test_prompts_of_others_are_computed(bed):
    """Another tenant, another system prompt, a chunk that is not stored: as if there were no Kamera."""
    scene = Scene(bed, 4030)
    other = [scene.ids[0], scene.ids[1] + 1, *scene.ids[2:]]
    for tenant, ids in (("another", scene.ids), ("", other)):
        out, tokens = supplied(bed, scene.plain(tenant, ids))
        assert tokens == 0 and same(out, ask(bed.llm, scene.plain("cold", ids)))
    scene.names[0] = "f" * 64
    out, tokens = supplied(bed, scene.plain())
    anchor = len(scene.window.recipe().anchor_ids)
    assert tokens <= anchor and same(out, ask(bed.llm, scene.plain("cold")))


@pytest.mark.parametrize("how", ["lost", "damaged", "formed again"])
def test_an_object_that_is_not_as_its_row_said_is_computed(bed, how, monkeypatch):
    scene = Scene(bed, {"lost": 4040, "damaged": 4041, "formed again": 4042}[how])
    part = scene.window.recipe().parts[2]
    if how == "lost":
        StoreAdmin(bed.store).delete(part.kv.key)
    elif how == "formed again":
        record = bed.store.get_patch(former_of(scene.window).context, part.chunk_id, part.patch.antecedents)
        StoreAdmin(bed.store).delete(part.patch.key)
        time.sleep(0.01)
        bed.store.put(record)
    else:
        (file,) = [f for f in bed.where.rglob("*") if part.kv.key in f.name]
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(bytes(data))
    before = bed.counts.all["refused_requests/load"]
    served = ask(bed.llm, scene.plain())
    assert bed.counts.all["refused_requests/load"] == before + 1
    assert same(served, ask(bed.llm, scene.plain("cold"))) and text(served) == scene.question.answer
    read(bed)
    served, _ = supplied(bed, scene.plain())
    assert same(served, ask(bed.llm, scene.plain("cold")))
    assert (
        bed.counts.all["refused_requests/load"] == before + 1
    )  # its row is known to be gone, or to be another


def test_a_survivor_answers_as_the_librarys_window_does(bed):
    right = []
    for number in range(4050, 4060):
        scene = Scene(bed, number)
        scene.window.slide()
        ids = bed.ids(scene.window, scene.question.text)
        names = [slot.chunk_id for slot in scene.window.slots]
        out, tokens = supplied(bed, prompt(ids, scene.images[1:], names))
        assert tokens == len(scene.window.recipe().ids)
        right.append(text(out) == scene.window.generate(scene.question.text, max_new_tokens=4))
    assert sum(right) >= 9


@pytest.mark.parametrize("named", [True, False], ids=["by its chunk's id", "by the engine's own hash"])
def test_a_picture_that_the_engine_has_harvested_is_known(bed, named):
    """Without an id the client need know nothing of Kamera: an alias leads from the hash to the chunk."""
    episode = HELD_OUT.episode(4070 + named, layout="LLLI")
    chunk = bed.backbone.chunk(episode.frames[0].content)
    window = KameraWindow(bed.backbone, ChunkStore.open("memory://"), policy=FULL)
    window.append(chunk)
    recipe, ids = window.recipe(), bed.ids(window, bound(episode)[0].text)
    given = prompt(ids, [episode.frames[0].image], [chunk.id])
    if not named:
        del given["multi_modal_uuids"]
    cold = ask(bed.llm, given, recipe.to_json())
    for _ in range(100):
        if bed.store.ls("canonical", chunk_id=chunk.id):  # which a moment ago was a file without a row
            break
        time.sleep(0.1)
    (row,) = bed.store.ls("canonical", chunk_id=chunk.id)
    assert len(row.outline.media) == 1 and (chunk.id in row.outline.media) == named
    assert scheduler_of(bed.llm).kv_cache_manager.reset_prefix_cache()
    read(bed)
    served, tokens = supplied(bed, given)
    assert tokens == len(recipe.ids) and same(cold, served)
