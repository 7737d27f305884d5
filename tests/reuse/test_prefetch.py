"""What a plan will place is read ahead; what cannot be read is a miss, and the answer is the same."""

from __future__ import annotations

import pytest

from kamera import ChunkStore
from kamera.store import StoreAdmin
from tests.reuse.rig import error, family, parts, plain, prompt, reuser

NAME = "llama_mqa"


@pytest.fixture
def folder(tmp_path):
    """A store's directory that holds a, b and c with their patches."""
    a, b, c, _, question = parts()
    with ChunkStore.open(tmp_path / "store") as store:
        reuser(family(NAME), store).prepare(prompt(a, b, c, question)).run()
    return tmp_path / "store"


def asked():
    a, b, c, _, question = parts()
    return prompt(a, b, c, question)


def answers_as_the_model(plan) -> None:
    done = plan.run()
    assert error(done.window.next_token_logits(done.question), plain(family(NAME), asked())) < 1e-4


def test_objects_that_were_read_ahead_are_in_memory(folder):
    with ChunkStore.open(folder) as store:
        plan = reuser(family(NAME), store).prepare(asked())
        plan.prefetch().wait()
        before = StoreAdmin(store).stats().memory
        answers_as_the_model(plan)
        assert [a.tier for a in plan.admissions] == ["exact", "patched", "patched"]
        assert StoreAdmin(store).stats().memory.misses == before.misses


def test_the_answer_is_the_same_without(folder):
    with ChunkStore.open(folder) as store:
        plan = reuser(family(NAME), store).prepare(asked())
        assert plan.prefetch() is plan.prefetch()  # begun once
        answers_as_the_model(plan)
    with ChunkStore.open(folder) as store:
        answers_as_the_model(reuser(family(NAME), store).prepare(asked()))


def test_a_failed_read_is_a_miss(folder, caplog):
    with ChunkStore.open(folder) as store:
        plan = reuser(family(NAME), store).prepare(asked())
        keys = {info.key for info in store.ls("exact")}
        for path in (p for p in folder.rglob("*") if p.is_file() and any(key in p.name for key in keys)):
            held = bytearray(path.read_bytes())
            held[-9] ^= 1
            path.write_bytes(held)
        plan.prefetch().wait()
        assert "was not read ahead" in caplog.text
        done = plan.run()
        assert [a.tier for a in done.admissions] == ["exact", "none", "none"]
        assert error(done.window.next_token_logits(done.question), plain(family(NAME), asked())) < 1e-4


def test_a_plan_of_misses_reads_nothing(folder):
    a, b, _, d, question = parts()
    with ChunkStore.open(folder) as store:
        plan = reuser(family(NAME), store).prepare(prompt(d, b, a, question))
        before = StoreAdmin(store).stats().memory
        plan.prefetch().wait()
        assert StoreAdmin(store).stats().memory == before
