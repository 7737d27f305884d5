"""kamera store: what it shows is what is there, what it removes is what it says."""

from __future__ import annotations

import time

import pytest

from kamera.store import ChunkStore
from tests.cli.run import files, kamera
from tests.store.builders import CONTEXT, canonical, patch

NAMES = "abc"


@pytest.fixture
def root(tmp_path):
    with ChunkStore.open(tmp_path / "s") as store:
        for name in NAMES:
            store.put(canonical(name * 64))
            store.put(patch(name * 64))
    return tmp_path / "s"


def objects(root, **more):
    with ChunkStore.open(root, **more) as store:
        return store.ls()


def spoil(root, chunk):
    """Damage a chunk's canonical; its key."""
    info = next(i for i in objects(root) if i.chunk_id == chunk * 64 and i.kind == "canonical")
    path = root / "objects" / f"{info.key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    return info.key


def as_json(capsys, *arguments):
    done = kamera(capsys, "store", *arguments, "--format", "json")
    return done.code, done.document


def test_verify_sets_damage_aside_says_so_and_fails(capsys, root):
    key = spoil(root, "b")
    code, document = as_json(capsys, "verify", root)
    assert (code, document["ok"]) == (1, 5)
    assert [key in line for line in document["quarantined"]] == [True]
    code, document = as_json(capsys, "quarantine", "ls", root)
    assert code == 0
    (copy,) = document["copies"]
    assert copy["name"] == key and copy["file"].startswith(key)
    assert as_json(capsys, "verify", root)[0] == 0
    assert as_json(capsys, "stats", root)[1]["quarantined"]["copies"] == 1


def test_gc_removes_down_to_the_budget_and_keeps_what_is_pinned(capsys, root):
    total = sum(info.bytes for info in objects(root))
    of_a = sum(info.bytes for info in objects(root) if info.chunk_id == "a" * 64)
    code, document = as_json(capsys, "pin", root, "a" * 64, "--ttl", "7d")
    assert (code, sum(pin["bytes"] for pin in document["pins"])) == (0, of_a)
    assert all(abs(pin["expires"] - time.time() - 7 * 86_400) < 3600 for pin in document["pins"])
    code, dry = as_json(capsys, "gc", root, "--max-bytes", of_a, "--dry-run")
    assert (code, dry["dry_run"], dry["bytes_before"], dry["bytes_after"]) == (0, True, total, of_a)
    assert len(objects(root)) == 6
    code, document = as_json(capsys, "gc", root, "--max-bytes", of_a)
    assert (code, document["fits"]) == (0, True)
    assert [r["key"] for r in document["removed"]] == [r["key"] for r in dry["removed"]]
    assert {info.chunk_id for info in objects(root)} == {"a" * 64}
    code, document = as_json(capsys, "gc", root, "--max-bytes", "0")
    assert (code, document["fits"], document["bytes_after"]) == (1, False, of_a)
    assert as_json(capsys, "unpin", root, "a" * 64) == (0, {"store": str(root), "unpinned": 2, "pinned": 0})
    assert as_json(capsys, "gc", root, "--max-bytes", "0")[0] == 0
    assert objects(root) == []


def test_pins_are_named_by_the_start_of_a_key_or_chunk(capsys, root):
    key = objects(root)[0].key
    code, document = as_json(capsys, "pin", root, key[:16], "bbbbbbbb")
    assert (code, {p["name"] for p in document["pins"]}) == (
        0,
        {key} | {info.key for info in objects(root) if info.chunk_id == "b" * 64},
    )
    assert as_json(capsys, "pin", root)[1] == document  # only shows
    for target, part in (("ffff", "begins with"), ("", "begins with")):
        wrong = kamera(capsys, "store", "pin", root, target)
        assert (wrong.code, wrong.out, part in wrong.err) == (1, "", True)
    assert as_json(capsys, "pin", root)[1] == document


def test_forget_removes_a_chunk_and_proves_it(capsys, root):
    code, document = as_json(capsys, "forget", root, "a" * 64)
    assert (code, len(document["removed"]), document["left"]) == (0, 2, [])
    assert {info.chunk_id for info in objects(root)} == {"b" * 64, "c" * 64}


def test_a_secret_comes_from_a_file_and_shows_what_it_names(capsys, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    root = tmp_path / "s"
    context = type(CONTEXT)(CONTEXT.fingerprint, CONTEXT.anchor, "acme")
    with ChunkStore.open(root, tenant="acme", secret=secret.read_bytes()) as store:
        store.put(canonical(context=context))
    mine = ("--tenant", "acme", "--secret-file", secret)
    assert as_json(capsys, "ls", root, *mine)[1]["objects"] == 1
    assert as_json(capsys, "ls", root, "--tenant", "acme")[1]["objects"] == 0
    code, document = as_json(capsys, "gc", root, "--max-bytes", "0", *mine)
    assert (code, document["objects_before"], document["objects_after"]) == (0, 1, 0)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "arguments",
    [
        ("gc", "--max-bytes", "much"),
        ("gc", "--quarantine-older", "soon"),
        ("pin", "a" * 64, "--ttl", "0s"),
        ("pin", "a" * 64, "--cap", "1kB", "--no-cap"),
        ("unpin",),
        ("forget",),
    ],
)
def test_bad_usage_changes_nothing(capsys, root, arguments):
    before = files(root)
    done = kamera(capsys, "store", arguments[0], root, *arguments[1:])
    assert (done.code, done.out) == (2, "")
    assert files(root) == before and len(objects(root)) == 6
