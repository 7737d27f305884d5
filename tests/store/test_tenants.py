"""Tenants, in pairs: what one must not see, and that the same question by its owner is answered."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import tenants
from kamera.errors import CorruptChunk
from kamera.store import ChunkStore, Context, StoreAdmin
from tests.store.builders import CONTEXT, VISION, assert_same, canonical, encoding, patch

SECRET, OTHER_SECRET = b"a secret of acme, 32 bytes long!", b"another secret, also long enough"
KEY = b"k" * 32
CHUNK = "c" * 64

STRANGERS: dict[str, dict[str, Any]] = {
    "another tenant": {"tenant": "beta", "secret": SECRET},
    "another tenant with its own secret": {"tenant": "beta", "secret": OTHER_SECRET},
    "another tenant without a secret": {"tenant": "beta"},
    "the tenant's name with another secret": {"tenant": "acme", "secret": OTHER_SECRET},
    "the tenant's name without a secret": {"tenant": "acme"},
    "nobody": {},
}
OWNERS: dict[str, dict[str, Any]] = {
    "secret": {"tenant": "acme", "secret": SECRET},
    "encrypted": {"tenant": "acme", "secret": SECRET, "keys": [KEY]},
}
pairs = pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
owners = pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)


def context_of(store: ChunkStore) -> Context:
    return replace(CONTEXT, tenant=store.tenant)


def fill(store: ChunkStore) -> str:
    context = context_of(store)
    store.put(patch(context=context))
    return store.put(canonical(context=context))


QUESTIONS: dict[str, Callable[[ChunkStore], Any]] = {
    "get_canonical": lambda s: s.get_canonical(context_of(s), CHUNK),
    "get_patch": lambda s: s.get_patch(context_of(s), CHUNK, ("x", "y")),
    "has_canonical": lambda s: s.has(context_of(s), CHUNK),
    "has_patch": lambda s: s.has(context_of(s), CHUNK, ("x", "y")),
    "patch_info": lambda s: s.info(context_of(s), CHUNK, ("x", "y")),
    "contexts_of": lambda s: s.contexts_of(CHUNK),
    "chunks": lambda s: s.ls("canonical", context=context_of(s)),
    "ls": lambda s: s.ls(),
    "stats": lambda s: StoreAdmin(s).stats().bytes,
    "census": lambda s: StoreAdmin(s).census().chunks,
    "verify": lambda s: StoreAdmin(s).verify().ok,
    "rebuild_index": lambda s: StoreAdmin(s).rebuild_index(),
    "forget": lambda s: StoreAdmin(s).forget(CHUNK).removed,
}


@pytest.mark.few(4)
@owners
@pairs
@pytest.mark.parametrize("place", ["here", "obstore+file://{}/remote"], ids=["directory", "remote"])
def test_a_stranger_misses_in_every_way_and_the_owner_hits(
    tmp_path: Path, place: str, owner: dict[str, Any], stranger: dict[str, Any]
) -> None:
    url = str(tmp_path / "here") if place == "here" else place.format(tmp_path)
    remote = {
        "contexts_of",
        "get_canonical",
        "get_patch",
        "has_canonical",
        "has_patch",
        "ls",
        "verify",
        "forget",
    }
    with ChunkStore.open(url, **owner) as mine, ChunkStore.open(url, **stranger) as theirs:
        one = fill(mine)
        assert StoreAdmin(theirs).copy(tmp_path / "theirs").canonicals == 0
        assert StoreAdmin(mine).copy(tmp_path / "mine").canonicals == 1
        for question, ask in QUESTIONS.items():
            if place == "here" or question in remote:
                assert not ask(theirs), question
        # the same chunk of both is two objects
        two = theirs.put(canonical(context=context_of(theirs), seed=2))
        assert one != two
        for store, seed in ((mine, 0), (theirs, 2)):
            context = context_of(store)
            assert_same(store.get_canonical(context, CHUNK), canonical(context=context, seed=seed))
        assert StoreAdmin(theirs).delete(two) and not StoreAdmin(theirs).delete(one)
        for question, ask in QUESTIONS.items():
            if place == "here" or question in remote:
                assert ask(mine), question


def test_a_file_of_one_tenant_under_anothers_name_is_refused(tmp_path: Path) -> None:
    """Both know one secret; the directory of one was mixed up with the other's."""
    with ChunkStore.open(tmp_path, tenant="acme", secret=SECRET) as mine:
        fill(mine)
        [acme] = (tmp_path / "tenants").iterdir()
        with ChunkStore.open(tmp_path, tenant="beta", secret=SECRET) as theirs:
            name = fill(theirs)
            [own] = (tmp_path / "tenants").glob(f"*/objects/{name}.safetensors")
            [other] = [p for p in acme.glob("objects/*") if p.stat().st_size == own.stat().st_size]
            own.write_bytes(other.read_bytes())
            with pytest.raises(CorruptChunk):
                theirs.get_canonical(context_of(theirs), CHUNK)
        assert StoreAdmin(mine).verify().ok == 2


# -- timing ------------------------------------------------------------------------------------


def lookups(store: ChunkStore, name: str) -> dict[str, list[str]]:
    """What each question costs, asked once before so that nothing is done for the first time."""
    questions = {**QUESTIONS, "delete": lambda s: StoreAdmin(s).delete(name)}
    for skipped in ("verify", "rebuild_index", "forget"):  # of one's own directory only, and they list it
        del questions[skipped]
    for ask in questions.values():
        ask(store)
    return {question: tenants.steps_of(lambda ask=ask: ask(store)) for question, ask in questions.items()}


@pytest.mark.few(2)
@pairs
def test_a_foreign_look_up_takes_the_same_steps_hit_or_miss(tmp_path: Path, stranger: dict[str, Any]) -> None:
    steps = []
    for root, chunk in ((tmp_path / "has it", CHUNK), (tmp_path / "has another", "d" * 64)):
        with ChunkStore.open(root, tenant="acme", secret=SECRET) as mine:
            context = context_of(mine)
            mine.put(canonical(chunk, context))
            mine.put(patch(chunk, context))
            name = mine._codec.name(canonical(context=context).key)
            with ChunkStore.open(root, **stranger) as theirs:
                steps.append(lookups(theirs, name))
    assert steps[0] == steps[1]
    assert {"Connection.execute"} <= {step for calls in steps[0].values() for step in calls}


def test_the_owners_steps_differ_so_the_test_above_can_fail(tmp_path: Path) -> None:
    steps = []
    for root, chunk in ((tmp_path / "has it", CHUNK), (tmp_path / "has another", "d" * 64)):
        with ChunkStore.open(root, tenant="acme", secret=SECRET, memory_limit=0) as mine:
            mine.put(canonical(chunk, context_of(mine)))
            steps.append(tenants.steps_of(lambda mine=mine: mine.get_canonical(context_of(mine), CHUNK)))
    assert steps[0] != steps[1]


def test_the_index_of_one_tenant_has_no_row_of_another(tmp_path: Path) -> None:
    for tenant in ("acme", "beta"):
        with ChunkStore.open(tmp_path, tenant=tenant, secret=SECRET) as store:
            fill(store)
    tables = [*(tmp_path / "tenants").glob("*/index.sqlite")]
    assert len(tables) == 2
    for table in tables:
        with sqlite3.connect(table) as db:
            tenants = {tenant for [tenant] in db.execute("SELECT tenant FROM objects")}
        db.close()
        assert len(tenants) == 1


def test_tenants_without_secrets_have_pictures_of_their_own(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path, tenant="acme") as one, ChunkStore.open(tmp_path, tenant="beta") as other:
        seen = encoding(tenant="acme")
        one.put(seen)
        assert other.get_encoding(VISION, seen.chunk_id) is None
        other.put(encoding(tenant="beta"))
        for store in (one, other):
            record = store.get_encoding(VISION, seen.chunk_id)
            assert record is not None and record.context.tenant == store.tenant
