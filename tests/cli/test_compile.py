"""kamera compile: reports, refusals that change nothing, and runs that go on."""

from __future__ import annotations

import json

import pytest

from kamera import ChunkStore
from tests.cli.run import files, kamera
from tests.compile.saved import pictures, vision_model, write_plan


@pytest.fixture
def plan(tmp_path):
    a, b, c = ([{"image": name}, f"{name}\n"] for name in pictures(tmp_path, 3))
    return write_plan(tmp_path, [a, b, c], [b, a])


def test_a_plan_is_compiled_and_a_second_run_does_nothing(capsys, tmp_path, plan):
    arguments = ("compile", vision_model(), plan, "--store", tmp_path / "s", "--orbit", "--format", "json")
    first = kamera(capsys, *arguments)
    document = first.document
    assert first.code == 0
    assert document["canonicals"] == {"formed": 3, "reused": 2, "skipped": 0}
    assert document["patches"] == document["orbits"] == {"formed": 3, "reused": 0, "skipped": 0}
    assert (document["windows"], document["chunks"], document["rank"]) == (2, 5, 32)
    with ChunkStore.open(tmp_path / "s") as store:
        assert document["bytes_stored"] == sum(
            row.bytes for row in store.ls() if row.kind not in ("anchor", "encoding")
        )
        assert {k: len(store.ls(k)) for k in ("canonical", "exact", "orbit")} == {
            "canonical": 3,
            "exact": 3,
            "orbit": 3,
        }
    before = files(tmp_path / "s")
    second = kamera(capsys, *arguments).document
    assert (second["forwards"], second["vision_encodes"], second["bytes_stored"]) == (0, 0, 0)
    assert second["patches"] == {"formed": 0, "reused": 3, "skipped": 0}
    assert files(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"chunks": ["a"], "basis": "b"}', "unknown key 'basis'"),
        ('{"chunks": [{"image": "gone.png"}]}', "no image at"),
        ('{"chunks": ["a"', "not JSON"),
        ('{"chunks": []}', "chunks is []"),
        ('{"chunks": [{"chunk_id": "0123"}]}', "no chunk '0123'"),
    ],
    ids=["unknown_key", "missing_image", "truncated", "empty_chunks", "unknown_chunk"],
)
@pytest.mark.parametrize("store", ["absent", "empty", "there"])
def test_a_bad_line_is_named_and_nothing_is_stored(capsys, tmp_path, line, says, store):
    folder = tmp_path / "s"
    if store == "empty":
        folder.mkdir()
    if store == "there":
        ChunkStore.open(folder).close()
    before = files(tmp_path)
    path = tmp_path / "plan.jsonl"
    path.write_text(json.dumps({"chunks": ["good"]}) + "\n" + line + "\n")
    done = kamera(capsys, "compile", vision_model(), path, "--store", folder, "--format", "json")
    assert (done.code, done.out) == (2, "")
    (error,) = done.err.splitlines()
    assert error.startswith(f"error: {path}:2: ")
    assert says in error
    path.unlink()
    assert files(tmp_path) == before
    assert folder.exists() == (store != "absent")


def test_a_failing_line_is_reported_and_the_others_are_done(capsys, tmp_path, plan):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    path = tmp_path / "two.jsonl"
    path.write_text('{"chunks": [{"image": "bad.png"}]}\n' + plan.read_text())
    done = kamera(capsys, "compile", vision_model(), path, "--store", tmp_path / "s", "--format", "json")
    (failure,) = done.document["failures"]
    assert done.code == 1
    assert failure["where"] == f"{path}:1"
    assert "bad.png" in failure["error"]
    assert done.document["patches"]["formed"] == 3
