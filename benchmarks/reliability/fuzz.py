"""Damage every region of stored objects; ``size`` is the number of mutations.

Regions are the length, the fixed prefix, the digest, each field of the header, each tensor's entry,
the padding, and each tensor. Each is flipped, overwritten, cut, doubled, swapped with another, or
spliced in from another object; some files also get a shuffled order of tensors. A mutated file must
be refused by name; one in a hundred goes through a store on disk, which must set it aside and then miss.
The second half seals what it breaks with digests that fit, as somebody with write access could: then the
parser must refuse it by name, or find exactly the bytes that it would write itself.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from benchmarks.reliability.forge import front_of, seal
from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.format import Codec

SIZE: int = 24_000
CREATED = 1.5
Region = tuple[str, int, int]


def regions(data: bytes) -> list[Region]:
    """Name, start and end of every part of an object file; together they are all of it."""
    size = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + size])
    cuts = {"length": 0, "prefix": 8, "digest": 35, "metadata": 99}
    text = data[: 8 + size]
    inner = json.loads(outer["__metadata__"]["kamera"])
    at = 99
    for field in inner:
        cuts[f"header {field}"] = at = text.index(f'\\"{field}\\":'.encode(), at)
    for name in outer:
        if name != "__metadata__":
            cuts[f"entry {name}"] = text.index(json.dumps(name).encode() + b":{", 99)
    if text.endswith(b" "):
        cuts["padding"] = len(text.rstrip(b" "))
    for name, entry in outer.items():
        if name != "__metadata__" and entry["data_offsets"][0] < entry["data_offsets"][1]:
            cuts[f"tensor {name}"] = 8 + size + entry["data_offsets"][0]
    starts = sorted(cuts.items(), key=lambda cut: cut[1])
    ends = [start for _, start in starts[1:]] + [len(data)]
    return [(name, start, end) for (name, start), end in zip(starts, ends, strict=True)]


def run(size: int, seed: int) -> dict[str, Any]:
    """Mutate ``size`` times, half of them with a digest that fits."""
    rng = random.Random(seed)
    files = {rig.record(slot, 7).key: Codec().encode(rig.record(slot, 7), CREATED) for slot in (0, 1, 2, 3)}
    tally: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore.open(Path(folder) / "store", memory_limit=0)
        for i in range(size):
            key = rng.choice(list(files))
            region, bad = mutated(rng, files[key], rng.choice(list(files.values())))
            sealed = i % 2 == 1
            if sealed:
                bad = seal(bad)
            if bad == files[key]:
                tally["unchanged"] += 1
                continue
            touched[region] += 1
            tally["sealed" if sealed else "mutations"] += 1
            tally[outcome(bad, key, sealed)] += 1
            if i % 100 == 0:
                tally["through a store"] += 1
                tally["served"] += through(store, key, files[key], bad)
        store.close()
    figures = (*("mutations", "sealed", "refused", "served", "reads as written", "differs", "other errors"),)
    every = {name for data in files.values() for name, _, _ in regions(data)}
    return {
        **{figure: tally[figure] for figure in figures},
        "through a store": tally["through a store"],
        "regions": len(every),
        "regions touched": len(every & touched.keys()),
    }


def mutated(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """A region of ``data`` and the file with that region damaged; ``other`` is a file to take from."""
    parts = regions(data)
    name, start, end = rng.choice(parts)
    damage = rng.choice(MUTATIONS)
    if damage is not None:
        return name, damage(rng, data, start, end, other)
    _, first, second = rng.choice(parts)  # two regions change places
    (a, b), (c, d) = sorted([(start, end), (first, second)])
    return name, data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:] if b <= c else data[:a] + data[b:]


def outcome(data: bytes, key: str, sealed: bool) -> str:
    """What reading ``data`` as the object ``key`` comes to, as a figure's name."""
    try:
        found = Codec().decode(data, key, "here")
    except (CorruptChunk, StoreVersionError):
        return "refused"
    except Exception:
        return "other errors"
    if not sealed:
        return "served"
    created = json.loads(json.loads(data[8 : front_of(data)])["__metadata__"]["kamera"])
    return "reads as written" if Codec().encode(found, created["created"]) == data else "differs"


def through(store: ChunkStore, key: str, intact: bytes, bad: bytes) -> int:
    """1 if a store serves ``bad`` in the place of ``intact``, or fails to be rid of it."""
    path = Path(store.url) / "objects" / f"{key}.safetensors"
    slot = next(slot for slot in (0, 1, 2, 3) if rig.record(slot, 7).key == key)
    rig.put(store, slot, 7)
    path.write_bytes(bad)
    try:
        rig.get(store, slot)
        return 1
    except CorruptChunk:
        return int(rig.get(store, slot) != 0 or StoreAdmin(store).drop_quarantined(key) != 1)
    except StoreVersionError:
        path.unlink()
        return 0


Damage = Callable[[random.Random, bytes, int, int, bytes], bytes]


def _flip_bit(rng: random.Random, data: bytes, start: int, end: int, _: bytes) -> bytes:
    bad = bytearray(data)
    bad[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    return bytes(bad)


def _overwrite(rng: random.Random, data: bytes, start: int, end: int, _: bytes) -> bytes:
    at = rng.randrange(start, end)
    span = rng.choice((rng.randbytes(rng.randint(1, 16)), b"\0" * 8, b"9" * 8, b'"', b"}", b"null", b"-1"))
    return data[:at] + span + data[at + len(span) :]


def _insert(rng: random.Random, data: bytes, start: int, end: int, _: bytes) -> bytes:
    at = rng.randrange(start, end)
    return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]


def _cut(rng: random.Random, data: bytes, start: int, end: int, _: bytes) -> bytes:
    at = rng.randrange(start, end)
    return data[:at] + data[at + rng.randint(1, 9) :]


def _truncate(rng: random.Random, data: bytes, start: int, end: int, _: bytes) -> bytes:
    return data[: rng.randrange(start, end)]


def _drop(_: random.Random, data: bytes, start: int, end: int, __: bytes) -> bytes:
    return data[:start] + data[end:]


def _double(_: random.Random, data: bytes, start: int, end: int, __: bytes) -> bytes:
    return data[:end] + data[start:end] + data[end:]


def _zero(_: random.Random, data: bytes, start: int, end: int, __: bytes) -> bytes:
    return data[:start] + bytes(end - start) + data[end:]


def _splice(_: random.Random, data: bytes, start: int, end: int, other: bytes) -> bytes:
    return data[:start] + other[start:end] + data[end:]


def _reorder(rng: random.Random, data: bytes, _: int, __: int, ___: bytes) -> bytes:
    """The same header in another order, or with two tensors of one shape in each other's place."""
    end = 8 + int.from_bytes(data[:8], "little")
    outer = json.loads(data[8:end])
    names = [name for name in outer if name != "__metadata__"]
    one, two = rng.choice(names), rng.choice(names)
    if outer[one]["shape"] == outer[two]["shape"] and rng.random() < 0.5:
        outer[one], outer[two] = outer[two], outer[one]
    else:
        rng.shuffle(names)
    text = json.dumps(
        {name: outer[name] for name in ("__metadata__", *names)}, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


MUTATIONS: tuple[Damage | None, ...] = (
    _reorder,
    _flip_bit,
    _flip_bit,
    _overwrite,
    _overwrite,
    _insert,
    _cut,
    _truncate,
    _drop,
    _double,
    _zero,
    _splice,
    None,
)
