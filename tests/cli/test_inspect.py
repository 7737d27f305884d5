"""kamera inspect and kamera store: what is there, verified, and nothing changed by looking."""

from __future__ import annotations

import re

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import Settings, read_plan, run_plan
from kamera.engines.hf import describe
from kamera.ops import kv_bytes
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


def shown(capsys, *arguments) -> dict:
    return kamera(capsys, "inspect", *arguments, "--format", "json").document


@pytest.mark.parametrize(
    ("prefix", "message"), [("zzzz", "no object or chunk here begins with 'zzzz'"), ("", "begins with ''")]
)
def test_an_unknown_or_ambiguous_prefix_fails(capsys, made, prefix, message):
    code, out, err = kamera(capsys, "inspect", made / "s", prefix)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert re.search(message, err)
