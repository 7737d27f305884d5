"""The attacks of `lab.reliability` on a small scale: they find nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kamera.store import ChunkStore
from lab.reliability import bombs, foreign, forks, full_disk, races, rig, saves
from lab.reliability.findings import Findings
from lab.reliability.redis_server import BINARY, MISSING
from lab.reliability.s3_server import MISSING as MOTO_MISSING

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root alone")
BITS = [(bombs.PATCH, bit) for bit in range(4770, 4790)]
"""A key in the header of a patch; a flip here has been believed."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs hangs longer than a busy machine takes."""
    for attack in (bombs, forks):
        monkeypatch.setattr(attack, "SECONDS", 200.0)


@pytest.mark.attack("forks")
def test_children_forked_amid_operations_read_put_and_open(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = forks.run(2, seed=1, fresh=False)
    assert figures["findings"] == 0, figures["found"]
    assert figures["done"]["children"] == 2


@pytest.mark.attack("races")
def test_two_tenants_of_one_directory_lose_no_object_and_no_pin() -> None:
    figures = races.run(15, seed=1)
    assert figures["findings"] == 0, figures["found"]
    assert figures["done"]["acknowledged"] and figures["done"]["acknowledged pins"]


@pytest.mark.slow
@ROOT_ONLY
@pytest.mark.attack("full_disk")
def test_a_full_file_system_is_read_collected_and_deleted_from() -> None:
    figures = full_disk.run(3, seed=1)
    assert figures["findings"] == 0, figures["found"]
    assert figures["done"]["steps"] == 10 and figures["done"]["acknowledged"]


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason=MISSING)
@pytest.mark.attack("foreign")
@pytest.mark.parametrize("kinds", [{"redis": ["list", "not UTF-8"]}, {"s3": [".."]}], ids=["redis", "s3"])
def test_foreign_keys_in_a_remote_change_nothing(kinds: dict[str, list[str]]) -> None:
    if "s3" in kinds:
        pytest.importorskip("moto", reason=MOTO_MISSING)
    figures = foreign.run(3, seed=1, kinds=kinds)
    assert figures["findings"] == 0, figures["found"]
    assert figures["done"]["foreign keys"] == 3 * sum(map(len, kinds.values()))


@pytest.mark.slow
@pytest.mark.attack("saves")
def test_windows_saved_into_one_directory_are_loaded_whole() -> None:
    figures = saves.run(2, seed=1)
    assert figures["findings"] == 0, figures["found"]
    assert figures["done"]["saves"] == 2 * saves.PROCESSES * saves.THREADS


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "whole") as store:
        for slot in (bombs.PATCH, bombs.CANONICAL, bombs.SOUND):
            rig.put(store, slot, 1)
    return tmp_path / "whole"


@pytest.mark.attack("bombs")
def test_a_header_with_a_flipped_bit_tells_nothing_wrong(whole: Path, tmp_path: Path) -> None:
    assert bombs._answers(whole, tmp_path / "at", BITS) == []


@pytest.mark.attack("bombs")
@pytest.mark.parametrize("target", bombs.TARGETS)
def test_a_link_is_neither_followed_nor_in_the_way(whole: Path, tmp_path: Path, target: str) -> None:
    found = Findings()
    for name in (f"tmp/{rig.record(bombs.PATCH, 1).key}.lock", "search/vectors.sqlite"):
        bombs._linked(whole, tmp_path / "at", name, name, target, found)
    figures = found.figures()
    assert figures["findings"] == 0, figures["found"]


@pytest.mark.slow
@pytest.mark.attack("bombs")
@pytest.mark.parametrize("bomb", bombs._bombs(0))
def test_a_bomb_costs_no_memory_and_hides_no_neighbour(whole: Path, tmp_path: Path, bomb: str) -> None:
    found, at = Findings(), tmp_path / "at"
    for looked in ("ls", "get", "rebuild_index"):
        bombs._copy(whole, at)
        bombs._bombs(40_000_000)[bomb](bombs._file(at, bombs.PATCH))
        bombs._looked(at, looked, bombs.LOOKS[looked], found)
    figures = found.figures()
    assert figures["findings"] == 0, figures["found"]
