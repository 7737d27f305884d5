"""An index on disk: shared, killed, damaged, foreign."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import CorruptIndex, ForeignIndex, UnusableIndex
from kamera.reuse import ContentIndex, CutRule, IndexFile, Media, Prompt, Scope

SCOPE = Scope("model", "tokenizer", "tenant")
RULE = CutRule(minimum=8, maximum=64, exponent=4, bits="low")


def prompt(seed: int, count: int = 300, behind: np.ndarray | None = None) -> Prompt:
    ids = np.random.default_rng(seed).integers(0, 9_000, count)
    ids = ids if behind is None else np.concatenate([behind, ids])
    return Prompt.of(ids, anchors=[len(ids) // 2], media=[Media(10, 30, "a picture")])


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "content.index"
    with IndexFile(path, SCOPE, RULE) as file:
        for seed in range(4):
            file.add(prompt(seed))
        file.add(prompt(9, behind=prompt(3).ids))
    return path


def in_another_process(path, *seeds: int):
    """A forked child that adds prompts; forked, as importing torch anew takes seconds."""

    def work():
        with IndexFile(path, SCOPE, RULE) as file:
            for seed in seeds:
                file.add(prompt(seed))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def test_what_one_process_adds_another_finds(made):
    with IndexFile(made, SCOPE, RULE) as here:
        assert here.find(prompt(77)).prefix == 0
        child = in_another_process(made, 77)
        child.join()
        assert child.exitcode == 0
        assert here.find(prompt(77)).prefix == 300


def test_a_file_says_what_memory_says(made, tmp_path):
    memory = ContentIndex(SCOPE, RULE)
    for one in (*map(prompt, range(4)), prompt(9, behind=prompt(3).ids)):
        memory.add(one)
    with IndexFile(made, SCOPE, RULE) as file:
        assert len(file.index) == len(memory)
        for seed in range(12):
            asked = prompt(seed % 5, behind=prompt(seed).ids)
            assert file.find(asked) == memory.find(asked)


def test_writers_take_turns(tmp_path):
    path = tmp_path / "content.index"
    children = [in_another_process(path, *range(first, first + 40)) for first in (0, 100, 200)]
    for child in children:
        child.join()
        assert child.exitcode == 0
    with IndexFile(path, SCOPE, RULE) as file:
        for first in (0, 100, 200):
            assert {file.find(prompt(seed)).prefix for seed in range(first, first + 40)} == {300}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_refused_by_name(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("index") / "content.index"
    with IndexFile(path, SCOPE, RULE) as file:
        file.add(prompt(1, 40))
        file.add(prompt(2, 40))
    held = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(held) - 1))
    held[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(held)
    with pytest.raises(CorruptIndex, match="rebuild"):
        IndexFile(path, SCOPE, RULE)
    assert path.read_bytes() == held


def test_frames_in_another_order_are_refused(made):
    held = made.read_bytes()
    cuts = [0]
    while cuts[-1] < len(held):
        cuts.append(cuts[-1] + 24 + int.from_bytes(held[cuts[-1] : cuts[-1] + 4], "little"))
    parts = [held[a:b] for a, b in itertools.pairwise(cuts)]
    for order in ([0, 2, 1, *range(3, len(parts))], [0, *range(2, len(parts))], [1, *range(1, len(parts))]):
        made.write_bytes(b"".join(parts[i] for i in order))
        with pytest.raises(CorruptIndex):
            IndexFile(made, SCOPE, RULE)


def test_a_killed_writer_leaves_all_that_was_whole(made):
    held = made.read_bytes()
    sizes = [int.from_bytes(held[:4], "little") + 24]
    sizes.append(sizes[0] + int.from_bytes(held[sizes[0] : sizes[0] + 4], "little") + 24)
    for length in (0, 3, sizes[0] - 1, sizes[0], sizes[0] + 5, sizes[1] - 1, sizes[1], len(held) - 1):
        made.write_bytes(held[:length])
        with IndexFile(made, SCOPE, RULE) as file:
            assert file.find(prompt(0)).prefix == (300 if length >= sizes[1] else 0)
            file.add(prompt(50))
            file.add(prompt(0))
        with IndexFile(made, SCOPE, RULE) as file:
            assert file.find(prompt(50)).prefix == file.find(prompt(0)).prefix == 300


@pytest.mark.parametrize(
    ("scope", "rule", "named"),
    [
        (replace(SCOPE, model="other"), RULE, "model"),
        (replace(SCOPE, tokenizer="other"), RULE, "tokenizer"),
        (replace(SCOPE, tenant="other"), RULE, "tenant"),
        (SCOPE, replace(RULE, exponent=5), "rule"),
    ],
)
def test_an_index_of_another_scope_is_refused_by_name(made, scope, rule, named):
    held = made.read_bytes()
    with pytest.raises(ForeignIndex, match=f"another {named}"):
        IndexFile(made, scope, rule)
    assert made.read_bytes() == held
    IndexFile(made, SCOPE, RULE).close()


def test_a_rebuilt_index_takes_the_place_of_the_damaged(made):
    with IndexFile(made, SCOPE, RULE) as reader:
        held = bytearray(made.read_bytes())
        held[len(held) // 2] ^= 4
        made.write_bytes(held)
        with IndexFile.rebuild(made, SCOPE, RULE, [prompt(2)]) as fresh:
            assert (fresh.find(prompt(2)).prefix, fresh.find(prompt(1)).prefix) == (300, 0)
            assert reader.find(prompt(1)).prefix == 0  # goes over to the new file
            reader.add(prompt(3))
            assert fresh.find(prompt(3)).prefix == 300
    assert [p.name for p in made.parent.iterdir()] == [made.name]


def test_a_file_that_is_no_index_is_refused(tmp_path):
    path = tmp_path / "content.index"
    for held in (b"x" * 40, b"\x80\x04]\x94." * 9):
        path.write_bytes(held)
        with pytest.raises(CorruptIndex):
            IndexFile(path, SCOPE, RULE)
        assert path.read_bytes() == held


def test_token_ids_lie_there_for_their_owner_only(made):
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o600


def _pipe(path):
    os.mkfifo(path)


def _dangling(path):
    path.symlink_to(path.parent / "nowhere")


def _link(path):
    (path.parent / "elsewhere").write_bytes(b"")
    path.symlink_to(path.parent / "elsewhere")


PLACES = {
    "folder": lambda path: path.mkdir(),
    "pipe": _pipe,
    "missing folder": lambda path: path.parent.rmdir(),
    "file for a folder": lambda path: (path.parent.rmdir(), path.parent.write_bytes(b"")),
    "dangling link": _dangling,
    "link": _link,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_holds_no_file_is_refused_by_name(tmp_path, place):
    path = tmp_path / "there" / "content.index"
    path.parent.mkdir()
    PLACES[place](path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    for use in (
        lambda: IndexFile(path, SCOPE, RULE),
        lambda: IndexFile.rebuild(path, SCOPE, RULE, [prompt(1)]),
    ):
        with pytest.raises(UnusableIndex, match=r"content\.index' cannot be used"):
            use()
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    if place == "link":
        assert (path.parent / "elsewhere").read_bytes() == b""


@pytest.mark.parametrize("half", [False, True])
def test_a_full_disk_is_told_by_name_and_loses_nothing(made, monkeypatch, half):
    write = os.pwrite

    def full(file, data, offset):
        if half:
            return write(file, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with IndexFile(made, SCOPE, RULE) as file:
        known = len(file.index)
        with monkeypatch.context() as disk:
            disk.setattr(os, "pwrite", full)
            with pytest.raises(UnusableIndex, match=r"No space left|bytes written"):
                file.add(prompt(50))
            with pytest.raises(UnusableIndex):
                IndexFile(made.with_name("new.index"), SCOPE, RULE)
            assert len(file.index) == known and file.find(prompt(3)).prefix == 300
        file.add(prompt(51))
    with IndexFile(made, SCOPE, RULE) as file:
        found = [file.find(prompt(seed)).prefix for seed in (3, 50, 51)]
    assert found == [300, 0, 300]


def test_an_index_goes_on_in_memory_while_its_file_is_no_file_and_comes_back(made):
    held = made.read_bytes()
    with IndexFile(made, SCOPE, RULE) as file:
        made.unlink()
        made.symlink_to(made.parent / "nowhere")
        for use in (lambda: file.find(prompt(3)), lambda: file.add(prompt(60))):
            with pytest.raises(UnusableIndex):
                use()
        assert file.index.find(prompt(3)).prefix == 300
        assert not (made.parent / "nowhere").exists()
        made.unlink()
        made.write_bytes(held)
        assert file.find(prompt(3)).prefix == 300
    with pytest.raises(UnusableIndex, match="closed"):
        file.add(prompt(61))


def test_a_forked_child_writes_through_a_file_of_its_own(made):
    with IndexFile(made, SCOPE, RULE) as file:

        def work():
            for seed in range(200, 230):
                file.add(prompt(seed))

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        for seed in range(300, 330):
            file.add(prompt(seed))
        child.join()
        assert child.exitcode == 0
        assert {file.find(prompt(s)).prefix for s in (*range(200, 230), *range(300, 330))} == {300}
