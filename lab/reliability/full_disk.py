"""A store on a real file system of ``--size`` MiB that is full; needs root, for the mount.

A tmpfs is mounted and filled: by puts until one is refused, and by a file that takes the rest. Then, with
not a byte left: what was acknowledged is read, the directory is opened, listed, counted, verified, read
through a mount that is read-only and in copies (with the index and without it), collected, deleted from;
a window appends and answers on it. When there is room again it is used as ever.

A finding: an error that is not Kamera's; an acknowledged object that is not read or not listed; an
operation of those above that fails; ``gc`` and ``delete`` that free nothing; a window whose answer is not
that of one in memory. A put that is refused by name is none. Without root nothing is run, and it says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.errors import KameraError
from kamera.store import StoreAdmin
from lab.reliability import rig
from lab.reliability.findings import Child, Findings

SIZE: int = 8
SECONDS = 120.0
_MOST = 4096  # puts, should none be refused
_QUESTION = "Q: where is the red box?"


def run(size: int, seed: int, *, window: bool = True) -> dict[str, Any]:
    """Fill a file system of ``size`` MiB and use what is on it; ``window``: with a model's too."""
    found = Findings()
    if os.geteuid() != 0:
        return found.figures() | {"not run": "a file system is mounted by root alone"}
    with tempfile.TemporaryDirectory() as folder:
        mount, spare = Path(folder) / "mount", Path(folder) / "spare"
        mount.mkdir()
        with _mounted(mount, size):
            root = mount / "store"
            acknowledged = _filled(root, found)
            victim = acknowledged.pop()  # it is deleted on the way
            _stuff(mount)
            for name, step in _steps(root, mount, spare, acknowledged, victim).items():
                _stepped(name, step, found)
                _stuff(mount)
            if window:
                _asked(root, found)
                _stuff(mount)
            _stepped("gc", lambda: _collected(root, acknowledged), found)
            (mount / "filler").unlink()
            _stepped("room again", lambda: _again(root), found)
    return found.figures()


@contextmanager
def _mounted(at: Path, size: int) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "kamera", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def _filled(root: Path, found: Findings) -> list[int]:
    """Put until a put is refused; the slots that were acknowledged."""
    done: list[int] = []
    with ChunkStore.open(root, memory_limit=0) as store:
        for slot in range(_MOST):
            try:
                rig.put(store, slot, 1)
            except KameraError:
                found.done["puts refused by name"] += 1
                if found.done["puts refused by name"] == 3:
                    break
            except Exception as error:
                found.add(f"a put fails: {type(error).__name__}", str(error))
            else:
                done.append(slot)
    found.done["acknowledged"] = len(done)
    return done


def _stuff(mount: Path) -> None:
    """Take what is left of the file system."""
    with open(mount / "filler", "ab", buffering=0) as file:
        for part in (2**16, 2**12):
            try:
                while True:
                    file.write(bytes(part))
            except OSError:
                continue


def _stepped(name: str, step: Callable[[], list[str]], found: Findings) -> None:
    """In a process of its own; it returns what is wrong."""
    end = Child(step, SECONDS).ended()
    found.done["steps"] += 1
    if end.how != "returned":
        found.add(f"{name}: {end.how}", end.why)
        return
    for wrong in end.result:
        found.add(f"{name}: {wrong.partition(': ')[0]}", wrong)


def _asked(root: Path, found: Findings) -> None:
    """A window on it: in this process, as torch's threads do not outlive a fork."""
    found.done["steps"] += 1
    try:
        wrong = _window(root)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    for line in wrong:
        found.add(f"a window on it: {line.partition(': ')[0]}", line)


def _steps(
    root: Path, mount: Path, spare: Path, acknowledged: list[int], victim: int
) -> dict[str, Callable[[], list[str]]]:
    def copied(index: bool) -> list[str]:
        shutil.rmtree(spare, ignore_errors=True)
        shutil.copytree(root, spare)
        for path in spare.glob("*.sqlite*") if not index else ():
            path.unlink()
        return _served(spare, acknowledged)

    def read_only() -> list[str]:
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        try:
            return _served(root, acknowledged)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)

    def restored() -> list[str]:
        """A copy without its index, where there is no room to make one."""
        for path in root.glob("index.sqlite*"):
            path.unlink()
        _stuff(mount)
        return _served(root, acknowledged)

    return {
        "opened": lambda: _served(root, acknowledged),
        "verified": lambda: _verified(root, acknowledged),
        "read-only": read_only,
        "a copy elsewhere": lambda: copied(True),
        "a copy elsewhere without its index": lambda: copied(False),
        "deleted from": lambda: _deleted(root, victim),
        "without its index": restored,
    }


def _served(root: Path, acknowledged: list[int]) -> list[str]:
    with ChunkStore.open(root, memory_limit=0) as store:
        lost = [slot for slot in acknowledged if rig.get(store, slot) != 1]
        listed = {info.chunk_id for info in store.ls()}
        unlisted = [slot for slot in acknowledged if rig.chunk(slot) not in listed]
        counted = StoreAdmin(store).stats().objects
    wrong = [f"lost: {len(lost)} objects"] if lost else []
    wrong += [f"not listed: {len(unlisted)} objects"] if unlisted else []
    return wrong + ([f"counted wrong: {counted}"] if counted < len(acknowledged) else [])


def _verified(root: Path, acknowledged: list[int]) -> list[str]:
    with ChunkStore.open(root, memory_limit=0) as store:
        report = StoreAdmin(store).verify()
    return [] if report.ok >= len(acknowledged) else [f"not found sound: {report}"]


def _deleted(root: Path, slot: int) -> list[str]:
    with ChunkStore.open(root, memory_limit=0) as store:
        if not StoreAdmin(store).delete(rig.record(slot, 1).key):
            return ["delete says there was none"]
        held = rig.get(store, slot)
    return [] if held == 0 and not _is_there(root, slot) else ["deleted and there"]


def _collected(root: Path, acknowledged: list[int]) -> list[str]:
    with ChunkStore.open(root, memory_limit=0) as store:
        report = StoreAdmin(store).gc(StoreAdmin(store).stats().bytes // 2)
        left = len(store.ls())
    if not report.removed or left >= len(acknowledged):
        return [f"frees nothing: {left} of {len(acknowledged)} objects left"]
    return _served(root, [slot for slot in acknowledged if _is_there(root, slot)])


def _is_there(root: Path, slot: int) -> bool:
    key = rig.record(slot, 1).key
    return (root / "objects" / f"{key}.safetensors").exists()


def _again(root: Path) -> list[str]:
    with ChunkStore.open(root, memory_limit=0) as store:
        for slot in range(9000, 9010):
            rig.put(store, slot, 1)
    return _served(root, list(range(9000, 9010)))


def _window(root: Path) -> list[str]:
    backbone = Backbone.from_pretrained(testbed.weights_dir(), dtype="float32").engine
    answers = []
    for store in (ChunkStore.open("memory://"), ChunkStore.open(root)):
        window = KameraWindow(
            backbone, store, "You watch a camera.", policy=ReusePolicy(certified=False, forms="always")
        )
        for frame in range(3):
            window.append(f"frame {frame} shows a box")
        window.slide()
        answers.append(window.next_token_logits(_QUESTION))
        store.close()
    return [] if torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-4) else ["answers otherwise"]
