"""Prompts without a recipe: what is recognised of them, from rows alone, and when they are salted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kamera import ChunkStore
from kamera.engines import Placeholder, Recipe
from kamera.engines.vllm.known import KnownPrompts, Least
from kamera.engines.vllm.positions import Positions
from kamera.engines.vllm.prompts import PromptTables
from kamera.engines.vllm.scheduler import SchedulerSide
from kamera.engines.vllm.stores import Stores
from kamera.ops import Blocks, PatchBudget, digest, ids_digest
from kamera.store import CanonicalRecord, Context, ObjectInfo, Outline, computed_base, survivor_id

ANCHOR = (1, 2, 3)
OWN = Context("f", ids_digest(ANCHOR))
BUDGET = PatchBudget(4, None)
A, B, C = ("a" * 64, "b" * 64, "c" * 64)
IDS = {A: (10, 20), B: (11, 9, 9, 21), C: (12, 22, 32)}
TOKENS = (*ANCHOR, *IDS[A], *IDS[B], *IDS[C], 7, 8)
PICTURE = [Placeholder(6, 2, B)]


def canonical(name: str, *, context: Context = OWN, kind: str = "canonical", media=()) -> ObjectInfo:
    """The row of an anchor or a canonical."""
    ids = ANCHOR if kind == "anchor" else IDS[name]
    places = torch.arange(len(ids))[None] + (0 if kind == "anchor" else len(ANCHOR))
    outline = Outline.of(torch.tensor(ids), places, (len(ids),), media)
    row = ObjectInfo(name, kind, name, context, (), len(ids), None, None, 1, 1.0, outline=outline)
    return replace(row, base="vision" if name == B else "")


def patch(name: str, behind: Sequence[str], formed: str = "exact", **changed: Any) -> ObjectInfo:
    """The row of a patch."""
    row = ObjectInfo(name, "exact", name, OWN, tuple(behind), len(IDS[name]), 4, formed, 1, 2.0)
    return replace(row, **{"budget": BUDGET, **changed})


ANCHOR_ROW = canonical(OWN.anchor, kind="anchor")
CHUNKS = [canonical(name) for name in (A, B, C)]
PATCHES = [patch(B, [A]), patch(C, [A, B])]
ROWS = [ANCHOR_ROW, *CHUNKS, *PATCHES]


def recognised(
    rows: Iterable[ObjectInfo] = ROWS, ids: Sequence[int] = TOKENS, media=PICTURE, least: Least = "patched",
    model: str = "f",
) -> Recipe | None:  # fmt: skip
    return KnownPrompts(BUDGET, rows).recipe(model, np.array(ids), media, least)


def served(rows: Iterable[ObjectInfo] = ROWS, **given: Any) -> list[tuple[str, str]]:
    """The chunks that are served, with their guarantees."""
    recipe = recognised(rows, **given)
    return [] if recipe is None else [(part.chunk_id, part.guarantee) for part in recipe.parts]


def test_a_prompt_of_stored_chunks_has_the_recipe_of_its_window():
    recipe = recognised()
    assert recipe is not None and recipe.ids == TOKENS[:-2] and recipe.missing == ()
    assert [(p.guarantee, p.antecedents) for p in recipe.parts] == [
        ("exact", ()), ("patched", (A,)), ("patched", (A, B)),
    ]  # fmt: skip
    assert [(p.start, p.position, p.offset) for p in recipe.parts] == [
        (3, (3,), (0,)), (5, (5,), (2,)), (9, (9,), (6,)),
    ]  # fmt: skip
    assert all(p.patch is None or (p.patch.created, p.patch.rank) == (2.0, 4) for p in recipe.parts)
    assert Recipe.from_json(recipe.to_json()) == recipe  # its keys are those of its fields


@pytest.mark.parametrize("changed", range(len(ANCHOR)))
def test_a_changed_system_prompt_is_not_recognised(changed):
    other = list(TOKENS)
    other[changed] += 1
    assert recognised(ids=other) is None
    assert recognised(ids=TOKENS[1:]) is None and recognised(ids=ANCHOR) is None
    assert recognised([*CHUNKS, *PATCHES]) is None  # its KV is not stored


def test_exact_serves_what_equals_a_prefill_and_is_not_salted():
    recipe = recognised(least="exact")
    assert [part.chunk_id for part in recipe.parts] == [A]
    assert recipe.salt == ""


@pytest.mark.parametrize(
    "spoilt",
    [
        patch(B, [A], "blind"),
        patch(B, [A], budget=PatchBudget(2, None)),
        patch(B, [A], budget=None),
        patch(B, [A], base="d" * 64),
    ],
    ids=["formed behind blind KV", "small", "no budget", "another base"],
)
def test_a_patch_that_a_window_would_not_take_is_not_served(spoilt):
    assert served([ANCHOR_ROW, *CHUNKS, spoilt]) == [(A, "exact")]


# -- stores, and the scheduler's side ----------------------------------------------------------------


def record(name: str, context: Context = OWN, kind: str = "canonical") -> CanonicalRecord:
    ids = torch.tensor(ANCHOR if kind == "anchor" else IDS[name])
    positions = torch.arange(len(ids))[None] + (0 if kind == "anchor" else len(ANCHOR))
    kv = Blocks([{"k": torch.zeros(1, 1, len(ids), 2)}], ((0,),))
    outline = Outline.of(ids, positions, (len(ids),))
    return CanonicalRecord(name, context, ids, positions, kv, kind=kind, outline=outline)


def fill(where: Any, *names: str, tenant: str = "") -> ChunkStore:
    own = replace(OWN, tenant=tenant)
    store = ChunkStore.open(where, tenant=tenant)
    store.put_many([record(own.anchor, own, "anchor"), *(record(name, own) for name in names)])
    return store


class Request(SimpleNamespace):
    """A request of vLLM, as far as the scheduler's side reads it."""

    def __init__(self, request_id: str, ids: Sequence[int] = TOKENS, salt: str | None = None, **given: Any):
        facts = {"kv_transfer_params": None, "skip_reading_prefix_cache": False, "resumable": False}
        facts |= {"mm_features": [], "block_hashes": [b"first"], **given}
        super().__init__(
            request_id=request_id, prompt_token_ids=list(ids), num_prompt_tokens=len(ids), cache_salt=salt,
            **facts,
        )  # fmt: skip

    def _block_hasher(self, request: Request) -> list[bytes]:
        return [b"behind " + b" ".join(self.block_hashes)]


def under(salt: str, hashed: bytes) -> bytes:
    return hashlib.blake2b(hashed, key=salt.encode(), digest_size=len(hashed)).digest()


MODEL = SimpleNamespace(of=lambda request: "f")


def side(where: Any, least: Least = "patched", block: int = 1) -> SchedulerSide:
    """A scheduler's side whose tables have been read."""
    stores = Stores(str(where))
    tables = PromptTables(stores, BUDGET, least, block)
    settle(tables)
    plain = Positions(SimpleNamespace(uses_mrope=False))
    return SchedulerSide(stores, MODEL, plain, tables=tables)


def settle(tables: PromptTables, tenant: str = "") -> KnownPrompts:
    """A tenant's table after one more look at its rows."""
    tables.of(tenant)
    mine = tables._tenants[tenant]
    if mine.future is None:
        mine.next_look = 0.0
        tables.of(tenant)
    mine.future.result(10)
    found = tables.of(tenant)
    assert found is not None
    return found


def test_what_is_patched_is_salted_before_its_pages_are_looked_up(tmp_path):
    fill(tmp_path, A)
    made, request = side(tmp_path), Request("r", salt="")
    made.tables._tenants[""].table = KnownPrompts(BUDGET, ROWS)
    picture = SimpleNamespace(mm_position=SimpleNamespace(offset=6, length=2), identifier=B)
    request.mm_features = [picture]
    made.arrive(request)
    own = recognised().salt
    assert own != "" == request.cache_salt and request.block_hashes == [under(own, b"first")]
    request.block_hashes.extend(request._block_hasher(request))  # as vLLM does when a block is full
    assert request.block_hashes[1:] == [under(own, b"behind first")]
    assert made.match(request, 0) == 12
    other = Request("s", mm_features=[picture])
    made.arrive(other, local=12)  # all of it stands in pages as it is: they are exact
    assert (other.block_hashes, made.match(other, 12)) == ([b"first"], 0)


def test_tenants_do_not_see_each_others(tmp_path):
    fill(tmp_path, A, tenant="acme")
    made = side(tmp_path)
    for tenant, supplied in (("acme", 5), ("other", 0), (None, 0)):
        settle(made.tables, tenant or "")
        request = Request(f"r {tenant}", salt=tenant)
        made.arrive(request)
        assert made.match(request, 0) == supplied and request.block_hashes == [b"first"]


def test_what_is_not_known_of_a_prompt_is_cut_at_its_turns_and_harvested(tmp_path):
    """The first token is its anchor; the last turn, which was opened for the answer, is no chunk."""
    made, opener = side(tmp_path, "survivor"), 1
    made.opener = opener
    turns = [(1, 10, 20), (1, 11, 9), (1, 12), (1, 13)]
    request = Request("r", [token for turn in turns for token in turn], num_computed_tokens=0)
    made.arrive(request)
    while (supplied := made.match(request, 0)) is None:
        pass
    pages = SimpleNamespace(get_block_ids=lambda name: ([0, 1],))
    chunks = made.take_harvests({"r": 10}, pages)
    assert supplied == 0 and request.block_hashes == [b"first"]
    assert [chunk.ids for chunk in chunks] == [(1,), (10, 20), (1, 11, 9), (1, 12)]
    names = [chunk.row.chunk_id for chunk in chunks[1:]]
    assert [chunk.row.antecedents for chunk in chunks[1:]] == [(), (names[0],), tuple(names[:2])]
    assert [chunk.row.kind for chunk in chunks] == ["anchor", "canonical", "exact", "exact"]


def conditioned(name: str, behind: Sequence[str], guarantee: str = "exact", at: int = 20) -> ObjectInfo:
    """The row of what an engine has computed behind others, from position ``at`` on."""
    ids, base = IDS[name], computed_base(guarantee)
    outline = Outline.of(torch.tensor(ids), at + torch.arange(len(ids))[None], (len(ids),))
    return ObjectInfo(
        name,
        "conditioned",
        name,
        OWN,
        tuple(behind),
        len(ids),
        None,
        None,
        1,
        1.0,
        base=base,
        outline=outline,
    )


def test_what_an_engine_computed_is_served_where_it_knew_all_that_stands_before_it():
    rows = [ANCHOR_ROW, canonical(A), conditioned(C, [A, B])]
    ids = (*ANCHOR, *IDS[A], *IDS[C], 7, 8)
    assert served(rows, ids=ids, media=(), least="survivor") == [(A, "exact"), (C, "survivor")]
    assert served(rows, ids=ids, media=()) == [(A, "exact")]
    own = [ANCHOR_ROW, canonical(A), conditioned(C, [A])]
    assert served(own, ids=ids, media=(), least="exact") == [(A, "exact"), (C, "exact")]
    other = [ANCHOR_ROW, canonical(A), conditioned(C, [B])]
    assert served(other, ids=ids, media=(), least="survivor") == [(A, "exact")]
    assert served(other, ids=ids, media=(), least="near") == [(A, "exact"), (C, "near")]
    recipe = recognised(rows, ids=ids, media=(), least="survivor")
    assert [part.offset for part in recipe.parts] == [(0,), (5 - 20,)] and recipe.salt != ""


def test_pages_behind_what_left_are_shared_by_longer_prompts_and_exact_ones_by_all():
    rows = [ANCHOR_ROW, canonical(A), conditioned(B, [A, C])]
    name = survivor_id(B, digest("kamera.lineage.v1", A, C)[:32])
    ids = (*ANCHOR, *IDS[A], *IDS[B], *IDS[C], 7)

    def salt(*more: ObjectInfo) -> str:
        recipe = recognised([*rows, *more], ids=ids, media=(), least="survivor")
        assert len(recipe.parts) == 2 + len(more)
        return recipe.salt

    assert salt() == salt(conditioned(C, [A, name], "patched", at=9)) != ""
    assert salt() != salt(conditioned(C, [A, name], "patched", at=10))  # computed elsewhere, and turned
    alone = [ANCHOR_ROW, canonical(A), conditioned(B, [A], at=5)]
    assert recognised(alone, ids=ids, media=(), least="exact").salt == ""
