"""kamera store export and import: from store to store, with secrets from files."""

from __future__ import annotations

import pytest

from kamera.store import ChunkStore
from tests.cli.run import kamera
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
