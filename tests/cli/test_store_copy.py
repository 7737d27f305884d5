"""kamera store export and import: from store to store, with secrets from files."""

from __future__ import annotations

import pytest

from kamera.store import ChunkStore
from tests.cli.run import files, kamera
from tests.store.builders import CONTEXT, assert_same, canonical, patch

A, B = "a" * 64, "b" * 64


@pytest.fixture
def root(tmp_path):
    with ChunkStore.open(tmp_path / "s") as store:
        for chunk in (A, B):
            store.put(canonical(chunk))
            store.put(patch(chunk, antecedents=(A,)))
    return tmp_path / "s"


def test_what_is_exported_is_imported_under_a_secret_and_a_key(capsys, root, tmp_path):
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    (tmp_path / "key").write_bytes(b"k" * 32)
    out = kamera(capsys, "store", "export", root, tmp_path / "b", "--format", "json")
    assert (out.code, out.document["canonicals"], out.document["patches"]) == (0, 2, 2)
    sealed = ("--secret-file", tmp_path / "secret", "--key-file", tmp_path / "key")
    into = kamera(capsys, "store", "import", tmp_path / "t", tmp_path / "b", *sealed, "--format", "json")
    assert (into.code, into.document["canonicals"], into.document["refused"]) == (0, 2, [])
    with ChunkStore.open(tmp_path / "t", secret=b"0123456789abcdef", keys=[b"k" * 32]) as store:
        assert_same(store.get_canonical(CONTEXT, A), canonical(A))
    again = kamera(capsys, "store", "import", tmp_path / "t", tmp_path / "b", *sealed)
    assert again.code == 0 and "present" in again.out


def test_an_unknown_chunk_is_an_error_without_a_store(capsys, root, tmp_path):
    done = kamera(capsys, "store", "export", root, tmp_path / "b", "--chunk", B, "--format", "json")
    assert (done.document["canonicals"], done.document["patches"]) == (1, 0)
    wrong = kamera(capsys, "store", "export", root, tmp_path / "c", "--chunk", "f" * 64)
    assert wrong.code == 1 and "nothing was copied" in wrong.err and wrong.err.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_a_directory_that_is_no_store_is_not_made_by_an_export(capsys, tmp_path):
    done = kamera(capsys, "store", "export", tmp_path / "no", tmp_path / "b")
    assert done.code == 2 and "nothing is at" in done.err
    assert not (tmp_path / "no").exists() and not (tmp_path / "b").exists()


def test_damage_fails_the_export_and_the_import(capsys, root, tmp_path):
    kamera(capsys, "store", "export", root, tmp_path / "b")
    file = next((tmp_path / "b" / "objects").iterdir())
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)
    into = kamera(capsys, "store", "import", tmp_path / "t", tmp_path / "b", "--format", "json")
    assert into.code == 1 and len(into.document["refused"]) == 1
    path = next(root.glob("objects/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    out = kamera(capsys, "store", "export", root, tmp_path / "c", "--format", "json")
    assert out.code == 1 and path.stem in out.document["refused"][0]
    (tmp_path / "d").mkdir()
    none = kamera(capsys, "store", "import", tmp_path / "t", tmp_path / "d")
    assert none.code == 1 and "no kamera store" in none.err


@pytest.mark.parametrize(
    "verb", [["convert", "s", "t/../s"], ["export", "s", "link"], ["import", "link", "s"]], ids=lambda v: v[0]
)
def test_a_store_is_not_copied_into_itself(capsys, root, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    (tmp_path / "link").symlink_to(root)
    before = files(root)
    done = kamera(capsys, "store", *verb)
    assert (done.code, done.out) == (2, "")
    assert "into itself" in done.err and done.err.count("\n") == 1
    assert files(root) == before
