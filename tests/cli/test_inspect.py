"""kamera inspect and kamera store: what is there, verified, and nothing changed by looking."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import Settings, read_plan, run_plan
from kamera.engines.hf import describe
from kamera.errors import StoreVersionError
from kamera.ops import kv_bytes
from kamera.store import StoreAdmin
from kamera.window.file import WINDOW, Saved
from lab.coded import coded
from tests.cli.run import files, kamera
from tests.compile.saved import SYSTEM, pictures, vision_backbone, write_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with two canonicals, a patch and an orbit patch, and a saved window."""
    folder = tmp_path_factory.mktemp("made")
    a, b = ([{"image": str(folder / name)}, f"{name}\n"] for name in pictures(folder, 2))
    with ChunkStore.open(folder / "s") as store:
        settings = Settings(rank=4, orbit=True)
        run_plan(read_plan(write_plan(folder, [a, b])), vision_backbone(), store, settings)
        window = KameraWindow(
            vision_backbone(), store, SYSTEM, policy=ReusePolicy(rank=4, forms="always"), max_tokens=500
        )
        window.append(a)
        window.append(b)
        window.save(folder / "w")
    return folder


@pytest.mark.parametrize(("bits", "dtype"), [(8, "int8"), (4, "uint8")])
def test_a_patch_in_codes_is_shown(capsys, made, tmp_path, bits, dtype):
    with ChunkStore.open(made / "s") as store, ChunkStore.open(tmp_path / "s") as other:
        row = next(row for row in store.ls() if row.kind == "exact")
        record = store.get_patch(row.context, row.chunk_id, row.antecedents)
        other.put(replace(record, patch=coded(record.patch, bits)))
    (shown,) = kamera(capsys, "inspect", tmp_path / "s", "--format", "json").document["contents"]
    assert (shown["intact"], shown["dtype"], shown["rank"]) == (True, dtype, 4)


def test_a_store_is_shown_with_what_its_patches_weigh(capsys, made):
    before = files(made)
    done = kamera(capsys, "inspect", made / "s", "--format", "json")
    document = done.document
    assert (done.code, document["kind"], document["objects"], document["damaged"]) == (0, "store", 7, 0)
    shown = {o["key"]: o for o in document["contents"]}
    with ChunkStore.open(made / "s") as store:
        listed = store.ls()
        assert shown.keys() == {i.key for i in listed}
        patch = next(i for i in listed if i.kind == "exact")
        record = store.get_patch(patch.context, patch.chunk_id, patch.antecedents)
        canonical = store.get_canonical(patch.context, patch.chunk_id)
    got = shown[patch.key]
    assert got["percent_of_kv"] == pytest.approx(100 * record.patch.nbytes / kv_bytes(canonical.kv))
    assert 0 < got["percent_of_kv"] < 100
    assert got["energy"] == record.info["energy"] < 1
    assert (got["rank"], got["tokens"], got["dtype"]) == (4, patch.tokens, "float32")
    assert got["antecedents"] == list(patch.antecedents)
    held = shown[next(i.key for i in listed if i.kind == "canonical" and i.chunk_id == patch.chunk_id)]
    assert held["channels"]["k"] == {"dtype": "float32", "shapes": [[2, patch.tokens, 16]], "layers": 3}
    assert files(made) == before


def test_one_object_file_finds_its_canonical_beside_it(capsys, made):
    with ChunkStore.open(made / "s") as store:
        (patch,) = store.ls("exact")
    (file,) = (made / "s").rglob(f"{patch.key}.safetensors")
    found = kamera(capsys, "inspect", file, "--format", "json").document
    assert found["key"] == patch.key
    assert found["intact"] is True
    assert 0 < found["percent_of_kv"] < 100
    alone = made / file.name
    alone.write_bytes(file.read_bytes())
    lost = kamera(capsys, "inspect", alone, "--format", "json")
    alone.unlink()
    assert (lost.code, lost.document["percent_of_kv"]) == (0, None)
    table = kamera(capsys, "inspect", file)
    assert "every byte is as it was written" in table.out
    assert patch.chunk_id in table.out


def test_a_saved_window_is_shown(capsys, made):
    document = kamera(capsys, "inspect", made / "w", "--format", "json").document
    assert document["kind"] == "window"
    assert document["max_tokens"] == 500
    assert document["policy"]["rank"] == 4
    assert [c["guarantee"] for c in document["chunks"]] == ["exact", "patched"]
    copy = document["chunks"][1]["copies"]["copy"]
    assert copy["rank"] == 4
    assert copy["percent_of_kv"] == pytest.approx(100 * copy["patch_bytes"] / copy["kv_bytes"])
    assert copy["kv_bytes"] == document["chunks"][1]["tokens"] * describe(vision_backbone()).bytes_per_token
    assert document["tokens"] == document["anchor_tokens"] + sum(c["tokens"] for c in document["chunks"])
    table = kamera(capsys, "inspect", made / "w")
    assert (table.code, "patched" in table.out) == (0, True)


def test_damage_is_told_and_left_where_it_is(capsys, made, tmp_path):
    with ChunkStore.open(made / "s") as store:
        (patch,) = store.ls("exact")
    (file,) = (made / "s").rglob(f"{patch.key}.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = files(made)
    try:
        done = kamera(capsys, "inspect", made / "s", "--format", "json")
        one = kamera(capsys, "inspect", file)
        assert files(made) == before
    finally:
        file.write_bytes(whole)
    assert (done.code, done.document["damaged"]) == (1, 1)
    (bad,) = [o for o in done.document["contents"] if not o["intact"]]
    assert patch.key in bad["path"]
    assert "digest" in bad["error"]
    assert (one.code, one.out.startswith("damaged: ")) == (1, True)


def test_a_damaged_window_is_one_line(capsys, made):
    file = made / "w" / "window.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        done = kamera(capsys, "inspect", made / "w")
    finally:
        file.write_bytes(whole)
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert "digest" in done.err


def test_what_another_format_wrote_is_refused_in_one_line(capsys, made):
    window, marker = made / "w" / "window.safetensors", made / "s" / "kamera-store.json"
    whole, named = window.read_bytes(), marker.read_bytes()
    document, tensors = WINDOW.read(made / "w")
    document["version"] = 0
    WINDOW.publish(made / "w", Saved(document, tensors))
    marker.write_text('{"format": 1}')
    before = files(made)
    try:
        shown = [kamera(capsys, "inspect", made / "w"), kamera(capsys, "store", "ls", made / "s")]
        with ChunkStore.open("memory://") as store, pytest.raises(StoreVersionError, match="window format 0"):
            KameraWindow.load(made / "w", vision_backbone(), store)
        assert files(made) == before
    finally:
        window.write_bytes(whole)
        marker.write_bytes(named)
    for done, says in zip(shown, ("window format 0", "a store of format 1"), strict=True):
        assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
        assert says in done.err and "damaged" not in done.err


def test_ls_lists_what_the_store_lists(capsys, made):
    with ChunkStore.open(made / "s") as store:
        keys = [i.key for i in store.ls()]
        patches = [i.key for i in store.ls("exact")]
    document = kamera(capsys, "store", "ls", made / "s", "--format", "json").document
    assert [o["key"] for o in document["listed"]] == keys
    some = kamera(capsys, "store", "ls", made / "s", "--kind", "exact", "--format", "json").document
    assert [o["key"] for o in some["listed"]] == patches
    last = kamera(capsys, "store", "ls", made / "s", "--limit", "1", "--format", "json").document
    assert ([o["key"] for o in last["listed"]], last["objects"]) == (keys[-1:], 7)
    table = kamera(capsys, "store", "ls", made / "s").out
    assert all(key[:12] in table for key in keys)
    other = kamera(capsys, "store", "ls", made / "s", "--tenant", "other", "--format", "json").document
    assert other["objects"] == 0


def test_stats_add_up(capsys, made):
    with ChunkStore.open(made / "s") as store:
        stats = StoreAdmin(store).stats()
    document = kamera(capsys, "store", "stats", made / "s", "--format", "json").document
    assert document["bytes"] == stats.bytes == sum(k["bytes"] for k in document["kinds"].values())
    assert document["kinds"]["canonical"]["objects"] == stats.canonicals == 2
    assert (document["objects"], document["chunks"], document["contexts"]) == (7, 2, 1)


def test_an_unknown_kind_is_bad_usage(capsys, made):
    done = kamera(capsys, "store", "ls", made / "s", "--kind", "cat")
    assert (done.code, done.out) == (2, "")
    kinds = "canonical, anchor, conditioned, encoding, exact, sampled, orbit"
    assert done.err == f"error: kind 'cat' is none of {kinds}\n"


@pytest.mark.parametrize("verb", [["store", "ls"], ["store", "stats"], ["inspect"]])
@pytest.mark.parametrize("what", ["absent", "empty", "strange"])
def test_a_folder_without_a_store_is_one_line_and_unchanged(capsys, tmp_path, verb, what):
    folder = tmp_path / "f"
    if what != "absent":
        folder.mkdir()
    if what == "strange":
        (folder / "notes.txt").write_text("x")
    done = kamera(capsys, *verb, folder)
    code = 2 if what == "absent" else 1
    assert (done.code, done.out, len(done.err.splitlines())) == (code, "", 1)
    assert str(folder) in done.err
    assert folder.exists() == (what != "absent")
    assert [p.name for p in tmp_path.rglob("*")] == {
        "absent": [],
        "empty": ["f"],
        "strange": ["f", "notes.txt"],
    }[what]


def test_a_file_that_is_no_object_is_damaged(capsys, tmp_path):
    file = tmp_path / ("a" * 64 + ".safetensors")
    file.write_bytes(b"\0" * 500)
    assert kamera(capsys, "inspect", file).code == 1
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\0" * 500)
    done = kamera(capsys, "inspect", other, "--format", "json")
    assert (done.code, done.document["intact"]) == (1, False)
    assert "not an object's name" in done.document["error"]


def shown(capsys, *arguments) -> dict:
    return kamera(capsys, "inspect", *arguments, "--format", "json").document


def test_one_object_or_chunk_of_a_store_is_shown(capsys, made):
    (patch,) = [o for o in shown(capsys, made / "s")["contents"] if o["kind"] == "exact"]
    for prefix in (patch["key"], patch["key"][:12]):
        found = shown(capsys, made / "s", prefix)
        assert [o["key"] for o in found["contents"]] == [patch["key"]] and found["inspected"] == 1
    found = shown(capsys, made / "s", patch["chunk_id"][:16])
    assert {o["chunk_id"] for o in found["contents"]} == {patch["chunk_id"]}
    assert {o["kind"] for o in found["contents"]} == {"canonical", "encoding", "exact", "orbit"}


@pytest.mark.parametrize(
    ("prefix", "message"), [("zzzz", "no object or chunk here begins with 'zzzz'"), ("", "begins with ''")]
)
def test_an_unknown_or_ambiguous_prefix_fails(capsys, made, prefix, message):
    code, out, err = kamera(capsys, "inspect", made / "s", prefix)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert re.search(message, err)


def test_a_beginning_of_several_objects_fails(capsys, made):
    key = shown(capsys, made / "s")["contents"][0]["key"]
    twin = f"{key[:8]}{'0' * 56}"
    path = made / "s" / "objects" / f"{twin}.safetensors"
    path.write_bytes(b"damaged")
    try:
        code, _, err = kamera(capsys, "inspect", made / "s", twin[:8])
    finally:
        path.unlink()
    assert code == 1 and "2 begin so" in err and err.count("\n") == 1


def test_an_object_of_what_is_no_store_fails(capsys, made):
    code, _, err = kamera(capsys, "inspect", made / "w", "ab12")
    assert code == 2 and "names an object of a store" in err and err.count("\n") == 1
