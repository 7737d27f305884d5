"""Objects that are there and are not taken: sealed, encrypted under another key, damaged."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from kamera import ChunkStore
from kamera.compile import ObjectCounts, Settings, read_plan, run_plan
from kamera.errors import WrongKey
from tests.cli.run import kamera
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_backbone, vision_model, write_plan

SECRET, KEY, STRAY = b"a secret of acme, 32 bytes long!", b"k" * 32, b"s" * 32
SETTINGS = Settings(rank=4)


@pytest.fixture
def frames(tmp_path) -> list[list]:
    return [[{"image": str(tmp_path / name)}, f"picture {name}\n"] for name in pictures(tmp_path, 4)]


@pytest.fixture
def plan(tmp_path, frames):
    return write_plan(tmp_path, frames[:3], [frames[1], frames[3]])


def test_secret_and_keys_of_a_tenant_come_from_files(capsys, tmp_path, plan):
    for name, data in (("secret", SECRET), ("key", KEY)):
        (tmp_path / name).write_bytes(data)
    given = ("--tenant", "acme", "--secret-file", tmp_path / "secret", "--key-file", tmp_path / "key")
    compile_it = ("compile", vision_model(), plan, "--store", tmp_path / "s", *given, "--format", "json")
    assert kamera(capsys, *compile_it).document["patches"]["formed"] == 3
    assert kamera(capsys, *compile_it).document["patches"] == {"formed": 0, "reused": 3, "skipped": 0}
    with ChunkStore.open(tmp_path / "s", tenant="acme", secret=SECRET, keys=[KEY]) as store:
        assert {kind: len(store.ls(kind)) for kind in ("canonical", "exact")} == {"canonical": 4, "exact": 3}


def test_a_wrong_key_fails_its_lines_by_name_and_changes_nothing(tmp_path, plan, caplog):
    sealed = partial(ChunkStore.open, tmp_path / "s", secret=SECRET)
    with sealed(keys=[KEY]) as store:
        run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*.safetensors")}
    with sealed(keys=[STRAY]) as store, caplog.at_level(logging.WARNING, "kamera"):
        report = run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
    assert {p: p.read_bytes() for p in (tmp_path / "s").rglob("*.safetensors")} == before
    assert [f.error.split(":")[0] for f in report.failures] == ["chunks[1]", "chunks[1]"]
    assert all("keys=" in f.error for f in report.failures)
    assert report.refused == 2
    assert report.patches == ObjectCounts(skipped=3)
    assert "a stored object was refused" in caplog.text
    with sealed(keys=[KEY]) as store:
        again = run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        assert (again.refused, again.failures, again.patches) == (0, (), ObjectCounts(reused=3))


def test_a_canonical_under_a_wrong_key_fails_what_needs_it_only(tmp_path, plan, frames):
    sealed = partial(ChunkStore.open, tmp_path / "s", secret=SECRET)
    with sealed(keys=[KEY]) as store:
        run_plan(read_plan(write_plan(tmp_path, frames[:1], name="a.jsonl")), vision_backbone(), store)
    with sealed(keys=[STRAY]) as store:
        report = run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        assert [(f.where.rpartition(":")[2], f.error[:9]) for f in report.failures] == [("1", "chunks[1]")]
        assert (report.refused, report.patches) == (1, ObjectCounts(formed=1, skipped=2))
        info = store.ls("canonical")[0]
        with pytest.raises(WrongKey):
            store.get_canonical(info.context, info.chunk_id)


def test_a_damaged_patch_is_counted_and_made_again(tmp_path, plan):
    with ChunkStore.open(tmp_path / "s") as store:
        run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        want = contents(store)
        (path,) = (tmp_path / "s").rglob(f"{store.ls('exact')[0].key}.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with ChunkStore.open(tmp_path / "s") as store:
        report = run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        assert (report.refused, report.patches) == (1, ObjectCounts(formed=1, reused=2))
        assert contents(store) == want
