"""What a process holds: decoded records up to a byte limit, and pins.

The least recently used records leave first; pinned ones stay.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from operator import attrgetter

from kamera.errors import PinsFull, quote
from kamera.store.keys import is_key
from kamera.store.records import Held, ObjectInfo, Record

BY_AGE = attrgetter("created", "key")
"""What objects are sorted by: oldest first, those of one moment by their keys."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]i?)?B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes of ``4096``, ``"512MiB"``, ``"4GiB"`` or ``"1GB"``.

    Raises `ValueError` for anything else, which it calls ``name``.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"{name} {quote(size)} is no size: give bytes, or text such as '4GiB'")
    number, unit = match.group(1), (match.group(2) or "").upper()
    base = 1024 if unit.endswith("I") else 1000
    return int(float(number) * base ** " KMGT".index(unit[:1] or " "))


def parse_duration(duration: float | str) -> float:
    """Seconds of ``90``, ``"30m"``, ``"12h"`` or ``"7d"``. Raises `ValueError` for anything else."""
    match = _DURATION.fullmatch(duration.strip()) if isinstance(duration, str) else None
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
    seconds = float(duration) if is_number else float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{quote(duration)} is no time: give seconds, or text such as '30m', '12h', '7d'")
    return seconds


@dataclass(frozen=True)
class Pin:
    """A pinned object: its bytes, the end of the pin (seconds since 1970; None: for good), and its ``home``,
    without which it is of no use, and which stays with it."""

    name: str
    bytes: int
    expires: float | None
    home: str | None = None


Pinned = tuple[dict[str, Pin], int | None]
"""Pins by name, and the cap."""


class Pins:
    """Objects that must not be removed until they are unpinned or their ttl ends; here of this process.

    They cannot be made again from the objects: a lost index costs time, a lost pin costs the object it kept.
    So damaged pins are an error, and no object counts as unpinned because of it. Safe to use from several
    threads. ``most``: a cap that nothing raises. ``clock`` returns seconds since 1970.

    A tier that keeps them says how: ``alone`` excludes others from changing pins, or removing objects by
    them, as far as that is possible; ``load`` returns all pins and the cap, and raises `StoreError` if they
    are damaged; ``save`` keeps these, safe when it returns, and gets the names of those that are new or gone,
    or "cap".
    """

    def __init__(
        self,
        most: int | None = None,
        clock: Callable[[], float] = time.time,
        *,
        alone: Callable[[], AbstractContextManager[object]] | None = None,
        load: Callable[[], Pinned] | None = None,
        save: Callable[[dict[str, Pin], int | None, Sequence[str]], None] | None = None,
    ) -> None:
        lock = threading.RLock()
        self._held: Pinned = {}, None
        self._most = most
        self._clock = clock
        self.alone = alone or (lambda: lock)
        self._load = load or (lambda: self._held)
        self._save = save or self._hold

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | str | None = None,
        homes: Mapping[str, str] | None = None,
    ) -> None:
        """Pin objects (name, bytes), all or none; those pinned already get the new ``ttl``.

        ``homes``: name of a patch to the name of its canonical, which is not removed either.
        Raises `PinsFull` when the pinned bytes would exceed `cap`, `ValueError` for what is no time.
        """
        seconds = None if ttl is None else parse_duration(ttl)
        if seconds == 0:
            raise ValueError("a pin of 0 seconds keeps nothing: give more")
        expires = None if seconds is None else self._clock() + seconds
        new = {name: Pin(name, size, expires, (homes or {}).get(name)) for name, size in objects}
        with self.alone():
            pins, cap, over = self._in_force()
            pinned = sum(pin.bytes for pin in (pins | new).values())
            if cap is not None and pinned > cap:
                raise PinsFull(
                    f"{pinned} bytes would be pinned, over the cap of {cap}: unpin something, or "
                    "raise the cap"
                )
            self._save(pins | new, cap, [*new, *over])

    def unpin(self, names: Iterable[str]) -> int:
        """Unpin objects; return the number that were pinned."""
        with self.alone():
            pins, cap, over = self._in_force()
            gone = pins.keys() & set(names)
            if gone:
                rest = {name: pin for name, pin in pins.items() if name not in gone}
                self._save(rest, cap, [*gone, *over])
            return len(gone)

    def list(self) -> list[Pin]:
        """All pins in force, by name."""
        pins, *_ = self._in_force()
        return [pins[name] for name in sorted(pins)]

    def names_to_keep(self) -> set[str]:
        """Names that must not be removed now: pinned objects, and the canonicals of pinned patches."""
        return {name for pin in self.list() for name in (pin.name, pin.home) if name}

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        return self._in_force()[1]

    def set_cap(self, cap: int | str | None) -> None:
        """Bound the bytes of future pins; present pins stay. Raises `ValueError` for what is no size."""
        size = None if cap is None else parse_size(cap, "cap")
        with self.alone():
            self._save(self._in_force()[0], size, ["cap"])

    def _in_force(self) -> tuple[dict[str, Pin], int | None, set[str]]:
        """Pins in force, the cap, and names of pins that are over."""
        pins, cap = self._load()
        now, most = self._clock(), self._most
        caps = [bound for bound in (cap, most) if bound is not None]
        in_force = {name: p for name, p in pins.items() if p.expires is None or p.expires > now}
        return in_force, min(caps) if caps else None, pins.keys() - in_force.keys()

    def _hold(self, pins: dict[str, Pin], cap: int | None, changed: Sequence[str]) -> None:
        self._held = pins, cap


def pins_of(text: bytes) -> Pinned:
    """Pins and cap of a JSON text. Raises `ValueError` for one that was not written as such."""
    try:
        data = json.loads(text)
        pins, cap = {pin["name"]: Pin(**pin) for pin in data["pins"]}, data["cap"]
        fits = [len(data) == 2, isinstance(cap, int | None)]
        for pin in pins.values():
            fits += [isinstance(pin.bytes, int), isinstance(pin.expires, int | float | None)]
            fits += [is_key(pin.name), pin.home is None or is_key(pin.home)]
    except (TypeError, KeyError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"it is not what is written there ({error})") from error
    if not all(fits):
        raise ValueError("it makes no sense")
    return pins, cap


def pins_text(pins: Iterable[Pin], cap: int | None) -> bytes:
    """The JSON text of pins and cap."""
    return json.dumps({"pins": [asdict(pin) for pin in pins], "cap": cap}).encode()


@dataclass(frozen=True)
class MemoryStats:
    """The memory tier: its content (sizes in bytes), and its look-ups by outcome since it was opened."""

    objects: int
    bytes: int
    limit: int
    hits: int
    misses: int
    evictions: int


class Memory:
    """Records by name, at most ``limit`` bytes of tensors. Safe to use from several threads.

    A record is valid for one ``stamp`` (of its file): a look-up with another drops it and is a miss. What is
    pinned or in ``names_to_keep`` is not evicted; a record for which that leaves no room is not kept.
    """

    def __init__(self, limit: int, names_to_keep: Container[str] = ()) -> None:
        self.limit = limit
        self.pins = Pins(most=limit // 2)  # so that the rest works on
        self._names_to_keep = names_to_keep
        self._entries: OrderedDict[str, tuple[Held, int]] = OrderedDict()  # with bytes of tensors
        self._chunks: dict[str, set[str]] = {}  # the names of each chunk's records
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, name: str, stamp: str | None = "") -> Record | None:
        """The record kept under ``name`` for ``stamp``, now the most recently used."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry[0].stamp != stamp:
                self._remove(name)
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(name)
            return entry[0].record

    def put(self, held: Held) -> bool:
        """Keep a record that nobody writes to any more, evicting others if needed; True if it is kept."""
        info, size = held.info, held.record.nbytes
        with self._lock:
            self._remove(info.key)
            excess = self._bytes + size - self.limit
            victims, pinned = [], self.pins.names_to_keep() if excess > 0 else set()
            for name, (_, other_size) in self._entries.items():
                if excess <= 0:
                    break
                if name not in pinned and name not in self._names_to_keep:
                    victims.append(name)
                    excess -= other_size
            if excess > 0:
                return False
            for name in victims:
                self._remove(name)
            self._evictions += len(victims)
            self._entries[info.key] = held._replace(data=b""), size
            self._chunks.setdefault(info.chunk_id, set()).add(info.key)
            self._bytes += size
            return True

    def drop(self, name: str) -> None:
        """Forget ``name``."""
        with self._lock:
            self._remove(name)

    def peek(self, name: str, stamp: str | None = None) -> Held | None:
        """What is kept under ``name`` (for that ``stamp``, if given); neither hit nor miss."""
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None or stamp not in (None, entry[0].stamp) else entry[0]

    def infos(self, chunk_id: str | None = None) -> list[ObjectInfo]:
        """Infos of all records kept, or of those of one chunk, oldest first."""
        with self._lock:
            names = self._entries if chunk_id is None else self._chunks.get(chunk_id, ())
            infos = [self._entries[name][0].info for name in names]
        return sorted(infos, key=BY_AGE)

    def stats(self) -> MemoryStats:
        """Counters since it was made, and its present content."""
        with self._lock:
            counts = self._hits, self._misses, self._evictions
            return MemoryStats(len(self._entries), self._bytes, self.limit, *counts)

    def clear(self) -> None:
        """Forget everything; the counters stay."""
        with self._lock:
            self._entries.clear()
            self._chunks.clear()
            self._bytes = 0

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= entry[1]
            chunk = entry[0].info.chunk_id
            self._chunks[chunk].discard(name)
            if not self._chunks[chunk]:
                del self._chunks[chunk]
