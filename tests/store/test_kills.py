"""The benchmarks of docs/benchmarks.md, small: what they count must be nothing here too."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import faults, kills, rig, writers
from kamera.store import ChunkStore

WRONG = ("torn", "lost", "disagreements", "leftovers")


def store_of(root: Path) -> kills.Oracle:
    """A store, and the oracle that knows it."""
    oracle = kills.Oracle()
    with ChunkStore.open(root) as store:
        for slot in range(kills.SLOTS // 2):
            rig.put(store, slot, 3)
            oracle.acknowledged(slot, 3)
    return oracle


def file_of(root: Path, slot: int) -> Path:
    key = rig.record(slot, 1).key
    return root / "objects" / f"{key}.safetensors"


def test_writers_killed_at_any_call_lose_nothing_acknowledged() -> None:
    found = kills.run(25, seed=1, moments=False)
    assert found["kills"] >= 25 and found["acknowledged"] > 25
    assert {name: found[name] for name in (*WRONG, "refused")} == dict.fromkeys((*WRONG, "refused"), 0)
    assert len(found["points"]) > 5


@pytest.mark.slow
def test_a_thousand_killed_writers_lose_nothing() -> None:
    found = kills.run(1000, seed=2)
    assert {name: found[name] for name in WRONG} == dict.fromkeys(WRONG, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "statement, phase", [(s, p) for s in ("INSERT", "COMMIT") for p in ("before", "after")]
)
def test_a_writer_killed_before_its_row_leaves_agreement(tmp_path: Path, statement: str, phase: str) -> None:
    oracle = store_of(tmp_path / "store")
    reader, writer = os.pipe()

    def work() -> None:
        with ChunkStore.open(tmp_path / "store") as store:
            rig.listen(store, kills.Deadly((statement, phase, 1)).said)
            os.write(writer, b"x")
            rig.put(store, 0, 9)

    child = rig.fork(work)
    _, status = os.waitpid(child, 0)
    assert os.read(reader, 1) == b"x" and os.WIFSIGNALED(status)
    oracle.interrupted(0, 9)
    found = kills.check(tmp_path / "store", oracle, verify=True)
    assert {name: found[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
    assert oracle.allowed[0] == {9}  # the file came before the row


@pytest.mark.few(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_check_itself_can_fail(tmp_path: Path, wrong: str) -> None:
    root = tmp_path / "store"
    oracle = store_of(root)
    assert kills.check(root, oracle) == Counter(checks=1)
    if wrong == "torn":
        with open(file_of(root, 0), "r+b") as file:
            file.truncate(900)
    elif wrong == "lost":
        oracle.acknowledged(0, 4)
    elif wrong == "disagreements":
        with ChunkStore.open(root) as store:
            index: Any = store._disk.index  # type: ignore[union-attr]
            info, stamp = index.get(next(row.key for row in store.ls() if row.formed))
            index.put([(replace(info, formed="another"), stamp)])  # a lie about an unchanged file
    else:
        (root / "tmp" / "stray").touch()
    assert kills.check(root, oracle)[wrong] > 0


def test_an_object_of_two_versions_is_told_from_a_whole_one() -> None:
    one = rig.record(2, 5)
    assert rig.version_of(one) == 5
    one.tensors()["positions"][0, 0] = 6
    assert rig.version_of(one) == -1


@pytest.mark.slow
def test_no_call_that_fails_loses_anything() -> None:
    found = faults.run(4, seed=5)
    assert found["unexpected"] == []
    figures = ("other errors", *WRONG, "stuck")
    assert {name: found[name] for name in figures} == dict.fromkeys(figures, 0)
    assert found["faults"] == 4 * len(faults.OPERATIONS)
    assert found["named errors"] > len(faults.OPERATIONS)
    assert found["short writes"]["whole"] == len(faults.KEPT) < found["short writes"]["writes"]


@pytest.mark.slow  # half a minute
def test_every_call_of_a_deletion_fails_by_name():
    """Pins, layers and rows are let go with the object: none of their files may fail without a name."""
    operation, errno = faults.OPERATIONS["delete"], faults.ERRORS[0]
    counted = faults.Injector()
    faults.attempt(operation, counted, Counter(), [])
    tally, unexpected = Counter(), []
    for at in range(1, len(counted.calls) + 1):
        faults.attempt(operation, faults.Injector(at, errno), tally, unexpected)
    assert unexpected == []
    assert tally["named errors"] > 10 and tally["torn"] == tally["lost"] == tally["stuck"] == 0


@pytest.mark.slow
def test_every_call_may_fail() -> None:
    found = faults.run(0, seed=0)
    figures = ("other errors", *WRONG, "stuck")
    assert {name: found[name] for name in figures} == dict.fromkeys(figures, 0)


def test_many_processes_and_threads_share_one_store() -> None:
    found = writers.run(8, seed=3)
    wrong = (*WRONG, "deadlocks", "failed", "written twice")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert found["operations"] == 8 * writers.PROCESSES * writers.THREADS
