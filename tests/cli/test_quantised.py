"""kamera compile --kv: a store in codes, compiled once, and told apart by every verb that lists it."""

from __future__ import annotations

from kamera import ChunkStore
from tests.cli.run import files, kamera
from tests.compile.saved import pictures, vision_model, write_plan


def test_a_plan_compiled_into_codes_reports_its_loss(capsys, tmp_path):
    a, b = ([{"image": name}, f"{name}\n"] for name in pictures(tmp_path, 2))
    plan, store = write_plan(tmp_path, [a, b]), tmp_path / "s"
    command = ("compile", vision_model(), plan, "--store", store, "--format", "json", "--kv", "int8")
    first = kamera(capsys, *command).document
    assert first["canonicals"]["formed"] == 2 and first["patches"]["formed"] == 1
    with ChunkStore.open(store) as opened:
        rows = [row for row in opened.ls() if row.kind not in ("anchor", "encoding")]
    assert {row.context.kv for row in rows} == {"int8"} and len(rows) == 3
    before = files(store)
    second = kamera(capsys, *command).document
    assert (second["forwards"], second["bytes_stored"]) == (0, 0)
    assert files(store) == before
    listed = kamera(capsys, "store", "ls", store).out
    assert listed.count("int8") == 3
    key = next(row.key for row in rows if row.kind == "canonical")
    path = store / "objects" / f"{key}.safetensors"
    found = kamera(capsys, "inspect", path, "--format", "json").document
    assert found["context"]["kv"] == "int8" and 0 < found["loss"]["relative"] < 0.01
    assert 25 < found["percent_of_kv"] < 40  # of float32
    assert "loss           relative" in kamera(capsys, "inspect", path).out
    plain = kamera(capsys, *command[:-2]).document
    assert plain["canonicals"]["formed"] == 2  # what is in codes is none of its


def test_an_unknown_form_is_refused_before_anything_is_made(capsys, tmp_path):
    plan = write_plan(tmp_path, [["a"]])
    refused = kamera(capsys, "compile", vision_model(), plan, "--store", tmp_path / "s", "--kv", "int3")
    assert refused.code == 2 and "int3" in refused.err
    assert not (tmp_path / "s").exists()
