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


def test_the_table_counts_too_and_no_bar_is_drawn_for_nobody(capsys, tmp_path, plan):
    done = kamera(
        capsys, "compile", vision_model(), plan, "--store", tmp_path / "s", "--limit", "1", "--rank", "4"
    )
    assert done.code == 0
    assert "\r" not in done.err
    assert "patches 2 formed, 0 reused, 0 skipped" in " ".join(done.out.split())
    with ChunkStore.open(tmp_path / "s") as store:
        assert {i.rank for i in store.ls("exact")} == {4}


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


def test_every_bad_line_gets_a_line(capsys, tmp_path):
    path = tmp_path / "plan.jsonl"
    path.write_text("{}\n[]\n")
    done = kamera(capsys, "compile", "never-loaded", path, "--store", tmp_path / "s")
    assert done.code == 2
    assert [line.split(": ")[1] for line in done.err.splitlines()] == [f"{path}:1", f"{path}:2"]


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


def test_a_foreign_folder_is_refused_before_loading(capsys, tmp_path, plan):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    before = files(folder)
    done = kamera(capsys, "compile", "never-loaded", plan, "--store", folder)
    assert done.code == 1
    assert "not a kamera store" in done.err
    assert len(done.err.splitlines()) == 1
    assert files(folder) == before


def test_a_model_that_does_not_load_fails_and_makes_no_store(capsys, tmp_path, plan):
    done = kamera(capsys, "compile", tmp_path / "nothing", plan, "--store", tmp_path / "s")
    assert done.code == 1
    assert done.err.startswith("error: no transformers model at")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("layers", ["1:3", "2,1"])
def test_layers_are_a_range_or_numbers(capsys, tmp_path, plan, layers):
    given = ("compile", vision_model(), plan, "--store", tmp_path / "s", "--layers", layers)
    assert kamera(capsys, *given).code == 0
    with ChunkStore.open(tmp_path / "s") as store:
        for info in store.ls("exact"):
            record = store.get_patch(info.context, info.chunk_id, info.antecedents)
            assert record.info["asked_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("layers", "says"), [("2:9", "layer 8 of a model of 3 layers"), ("all", "layers 'all'"), ("3:1", "'3:1'")]
)
def test_layers_that_are_none_are_a_usage_error(capsys, tmp_path, plan, layers, says):
    done = kamera(capsys, "compile", vision_model(), plan, "--store", tmp_path / "s", "--layers", layers)
    assert done.code == 2
    assert says in done.err.splitlines()[0]
    with ChunkStore.open(tmp_path / "s") as store:
        assert store.ls() == []


def test_ids_without_a_store_are_refused_before_loading(capsys, tmp_path):
    path = tmp_path / "plan.jsonl"
    path.write_text('{"chunks": ["a", {"chunk_id": "0123"}]}\n')
    done = kamera(capsys, "compile", "never-loaded", path, "--store", tmp_path / "s")
    assert done.code == 2
    assert done.err.startswith(f"error: {path}:1: chunks[1]: no chunk '0123'")
    assert not (tmp_path / "s").exists()
