"""Files made to cost or to mislead, in a store's directory; ``--size`` is how many header bits are flipped.

Sparse files and giant headers stand where objects stand; bits of a header are flipped, one at a time, a
digest not made anew; and a link (to a file, to a folder, to nowhere) takes the place of every file and
folder of a store, and of those it makes for a moment (locks, halves of files). Every look is a process of
its own, with `MEMORY` bytes above what it begins with, and ended after `SECONDS`.

A finding: a look that hangs, runs out of memory or dies; an answer about another object than the one that
was stored; a sound object that is not served or not listed beside a bomb; an error that is not Kamera's;
an opening that a link below ``tmp`` prevents; and a link that was followed: what is outside has changed.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import KameraError
from kamera.store import ChunkStore, StoreAdmin
from lab.reliability import forge, rig
from lab.reliability.findings import Child, Findings

SIZE: int = 400
SECONDS = 20.0
MEMORY = 768 * 2**20
PATCH, CANONICAL, SOUND = 0, 2, 3
"""Slots: two that are tampered with, and one beside them."""
_FLIPS = 50  # of one process

Look = Callable[[Path], Any]


def run(
    size: int, seed: int, header: int = 97_000_000, parts: Sequence[str] = ("bombs", "bits", "links")
) -> dict[str, Any]:
    """Every bomb and every link, ``size`` flipped bits; ``header``: bytes of a giant one."""
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        with ChunkStore.open(whole) as store:
            for slot in (PATCH, CANONICAL, SOUND):
                rig.put(store, slot, 1)
        at = Path(folder) / "at"
        for name, bomb in _bombs(header).items() if "bombs" in parts else ():
            for looked, look in LOOKS.items():
                _copy(whole, at)
                bomb(_file(at, PATCH))
                _looked(at, f"{name}: {looked}", look, found)
                found.done["bombs looked at"] += 1
        if "bits" in parts:
            _flipped(whole, at, size, random.Random(seed), found)
        for name, place in _places(whole).items() if "links" in parts else ():
            for target in TARGETS:
                _linked(whole, at, name, place, target, found)
    return found.figures()


# -- what a look must give ---------------------------------------------------------------------------


def _opened(root: Path) -> Any:
    with ChunkStore.open(root, memory_limit=0) as store:
        held = rig.get(store, SOUND)
    return None if held == 1 else f"the sound object is served as version {held}"


def _listed(root: Path) -> Any:
    with ChunkStore.open(root, memory_limit=0) as store:
        chunks = {info.chunk_id for info in store.ls()}
    return None if rig.chunk(SOUND) in chunks else "the sound object is not listed"


def _rebuilt(root: Path) -> Any:
    with ChunkStore.open(root, memory_limit=0) as store:
        StoreAdmin(store).rebuild_index()
        chunks = {info.chunk_id for info in store.ls()}
    return None if rig.chunk(SOUND) in chunks else "the sound object is not listed"


def _lost_index(root: Path) -> Any:
    for path in root.glob("index.sqlite*"):
        path.unlink()
    return _listed(root)


def _got(root: Path) -> Any:
    with ChunkStore.open(root, memory_limit=0) as store:
        try:
            held = rig.get(store, PATCH)
        except KameraError:
            held = 0
    return None if held in (0, 1) else f"a bomb is served as version {held}"


def _asked(root: Path) -> Any:
    with ChunkStore.open(root, memory_limit=0) as store:
        try:
            info = store.info(rig.CONTEXT, rig.chunk(PATCH), ())
        except KameraError:
            return None
    return None if info is None or (info.rank, info.formed) == (1, "1") else f"a bomb's info is {info}"


def _verified(root: Path) -> Any:
    with ChunkStore.open(root, memory_limit=0) as store:
        ok = StoreAdmin(store).verify().ok
    return None if ok == 2 else f"verify finds {ok} sound objects of 2"


LOOKS: dict[str, Look] = {
    "open and get another": _opened,
    "ls": _listed,
    "rebuild_index": _rebuilt,
    "open without an index": _lost_index,
    "get": _got,
    "patch_info": _asked,
    "verify": _verified,
}


def _looked(root: Path, name: str, look: Look, found: Findings) -> None:
    end = Child(lambda: look(root), SECONDS, MEMORY).ended()
    if end.how != "returned":
        found.add(f"{name} {end.how}", end.why)
    elif end.result:
        found.add(f"{name} is wrong", str(end.result))


# -- bombs -----------------------------------------------------------------------------------------


def _bombs(header: int) -> dict[str, Callable[[Path], None]]:
    def sparse(size: int, told: int) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            with open(path, "r+b") as file:
                file.write(told.to_bytes(8, "little"))
                file.truncate(size)

        return make

    def giant(path: Path) -> None:
        """A header of so many bytes that is JSON, and whose digest does not fit."""
        data = path.read_bytes()
        old = 8 + int.from_bytes(data[:8], "little")
        text = data[8:old].rstrip()
        names = b",".join(b'"n%d":[0]' % i for i in range(header // 15))
        text = text[:-1] + b"," + names + b"}"
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[old:])

    def swollen(path: Path) -> None:
        """The last tensor takes 8 GiB, by a header that is sealed; 4 KiB are on the disk."""
        outer, kamera, rest = forge.split(path.read_bytes())
        tensors = {name: entry for name, entry in outer.items() if name != "__metadata__"}
        last = max(tensors.values(), key=lambda entry: entry["data_offsets"][1])
        begin, end = last["data_offsets"]
        times = 8 * 2**30 // (end - begin)
        last["shape"] = [last["shape"][0] * times, *last["shape"][1:]]
        last["data_offsets"] = [begin, begin + (end - begin) * times]
        path.write_bytes(forge.join(outer, kamera, rest))
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size + (end - begin) * (times - 1))

    def grown(path: Path) -> None:
        """The very file, and 8 GiB of nothing behind it."""
        with open(path, "r+b") as file:
            file.truncate(8 * 2**30)

    return {
        "8 GiB of header in a sparse file": sparse(8 * 2**30, 8 * 2**30 - 8),
        "a header longer than the file": sparse(4096, 8 * 2**30),
        "a header of 2**63 bytes": sparse(8 * 2**30, 2**63 - 1),
        "8 GiB behind the tensors": grown,
        "8 GiB of a tensor, a digest that fits": swollen,
        "a giant header": giant,
    }


def _flipped(whole: Path, at: Path, size: int, rng: random.Random, found: Findings) -> None:
    """One bit of a header: whatever is answered is the truth."""
    drawn = []
    for slot in (PATCH, CANONICAL):
        end = 8 + int.from_bytes(_file(whole, slot).read_bytes()[:8], "little")
        drawn += [(slot, bit) for bit in rng.sample(range(8 * end), min(8 * end, size // 2))]
    for start in range(0, len(drawn), _FLIPS):
        batch = drawn[start : start + _FLIPS]
        ended = Child(lambda b=batch: _answers(whole, at, b), _FLIPS * SECONDS, MEMORY).ended()
        if ended.how != "returned":
            found.add(f"flipped bits: {ended.how}", ended.why)
            continue
        for kind, example in ended.result:
            found.add(kind, example)
        found.done["bits flipped"] += len(batch)


def _answers(whole: Path, at: Path, batch: list[tuple[int, int]]) -> list[tuple[str, str]]:
    wrong = []
    with ChunkStore.open(whole, memory_limit=0) as store:
        truth = {name: ask(store) for name, ask in QUESTIONS.items()}
    for slot, bit in batch:
        _copy(whole, at)
        path = _file(at, slot)
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        for path in at.glob("index.sqlite*"):
            path.unlink()
        with ChunkStore.open(at, memory_limit=0) as store:
            for name, ask in QUESTIONS.items():
                try:
                    answer = ask(store)
                except KameraError:
                    continue
                except Exception as error:
                    wrong.append((f"flipped bits: {name}: {type(error).__name__}", f"bit {bit}: {error}"))
                    continue
                if answer and answer != truth[name]:
                    wrong.append((f"flipped bits: {name} is wrong", f"bit {bit} of slot {slot}: {answer}"))
    return wrong


QUESTIONS: dict[str, Callable[[ChunkStore], Any]] = {
    "patch_info": lambda s: _told(s.info(rig.CONTEXT, rig.chunk(PATCH), ())),
    "canonical_info": lambda s: _told(s.info(rig.CONTEXT, rig.chunk(CANONICAL))),
    "get of a patch": lambda s: rig.get(s, PATCH),
    "get of a canonical": lambda s: rig.get(s, CANONICAL),
    # of the ones that are listed
    "ls": lambda s: {} if len(rows := s.ls()) < 3 else {row.key: _told(row) for row in rows},
}


def _told(info: Any) -> str:
    """What an info says of the object itself."""
    if info is None:
        return ""
    return (
        f"{info.key} {info.kind} {info.chunk_id} {info.context} {info.antecedents} {info.rank} {info.formed}"
    )


# -- links -----------------------------------------------------------------------------------------

TARGETS = ("a file", "a folder", "nowhere")
_MARK = b"what is outside"


def _places(whole: Path) -> dict[str, str]:
    """Every file and folder of a store, and those that it makes, by how they are told."""
    key = rig.record(PATCH, 1).key
    there = sorted(str(path.relative_to(whole)) for path in whole.rglob("*"))
    made = [f"tmp/{key}.lock", f"tmp/{key}.part", "tmp/index.lock", "index.sqlite-wal", "index.sqlite-shm"]
    made += ["pins.sqlite", "pins.json", "quarantine", "certificates"]
    hidden = {key: "KEY"}
    names = dict.fromkeys([*there, *made])
    told = {}
    for name in names:
        shown = name
        for secret, word in hidden.items():
            shown = shown.replace(secret, word)
        told[shown] = name
    return told


def _linked(whole: Path, at: Path, name: str, place: str, target: str, found: Findings) -> None:
    """Put a link there, do all that a store does, and look at what it leads to."""
    _copy(whole, at)
    outside = at.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(_MARK)
    (outside / "folder" / "file").write_bytes(_MARK)
    path = at / place
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    to = {"a file": outside / "file", "a folder": outside / "folder", "nowhere": outside / "made"}
    path.symlink_to(to[target])
    found.done["links"] += 1
    what = f"{name} is a link to {target}"
    end = Child(lambda: _everything(at), SECONDS, MEMORY).ended()
    if end.how != "returned":
        found.add(f"{what}: {end.how}", end.why)
    else:
        for kind in end.result["wrong"]:
            found.add(f"{what}: {kind}")
        if end.result["opens"] != "yes" and place.startswith("tmp/"):
            found.add(f"{what}: the store does not open", end.result["opens"])
    left = {str(path.relative_to(outside)): path for path in outside.rglob("*") if path.is_file()}
    if sorted(left) != ["file", "folder/file"] or any(p.read_bytes() != _MARK for p in left.values()):
        found.add(f"{what}: it was followed", str(sorted(left)))


def _everything(root: Path) -> dict[str, Any]:
    """All that a store does; refusals by name are none of the wrong ones."""
    wrong: list[str] = []
    try:
        store = ChunkStore.open(root, memory_limit=0)
    except KameraError as error:
        return {"opens": f"{type(error).__name__}: {error}", "wrong": wrong}
    works: dict[str, Callable[[], Any]] = {
        "get": lambda: rig.get(store, SOUND),
        "put": lambda: rig.put(store, PATCH, 2),
        "put another": lambda: rig.put(store, 7, 1),
        "ls": store.ls,
        "pin": lambda: StoreAdmin(store).pin([rig.record(SOUND, 1).key]),
        "verify": StoreAdmin(store).verify,
        "rebuild_index": StoreAdmin(store).rebuild_index,
        "forget": lambda: StoreAdmin(store).forget(rig.chunk(CANONICAL)),
        "gc": lambda: StoreAdmin(store).gc(0, quarantine_age=0),
        "delete": lambda: StoreAdmin(store).delete(rig.record(7, 1).key),
        "close": store.close,
    }
    for name, work in works.items():
        try:
            work()
        except KameraError:
            continue
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}")
    return {"opens": "yes", "wrong": wrong}


def _copy(whole: Path, at: Path) -> None:
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(whole, at, symlinks=True)


def _file(root: Path, slot: int) -> Path:
    key = rig.record(slot, 1).key
    return root / "objects" / f"{key}.safetensors"
