"""The file of an object: writing one, and reading one that nobody vouches for.

It is a safetensors file, which any reader of these reads. Its header has a digest, at a fixed place, so it is
verified before anything in it is parsed; and it holds the digests of all pieces of the tensors. It is written
here and not by the library for that place. `docs/stores.md` specifies it. Pickle is never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_128

from kamera.errors import CorruptChunk, ForeignObject, StoreVersionError, WrongKey
from kamera.ops import tensor_bytes
from kamera.store.keys import KINDS, Context, object_key
from kamera.store.records import Header, Held, ObjectInfo, Record, canonical_json, is_count, record_of

FORMAT_VERSION = 6
"""The format in an object's header; an object of any other raises `StoreVersionError`."""
DIRECTORY_VERSION = 9
"""The format in `kamera-store.json`; a directory of any other raises `StoreVersionError`."""

HASH = "xxh3-128"
"""The hash of the pieces of plain objects. It shows every accident, at the speed of memory; who can write to
a plain store can make digests that fit, whatever the hash."""
STRONG_HASH = "sha256" if find_spec("blake3") is None else "blake3"
"""That of sealed objects, whose digests vouch for them; BLAKE3 is read at three times the speed."""
PIECE = 8 * 2**20
"""Bytes of tensors that have a digest of their own: threads read and verify pieces side by side."""
MAX_HEADER = 4 * 2**20
"""Most bytes of a header: a real chunk's takes some 10 KiB, and reading a header takes 25 times its size."""
DIGEST = slice(35, 99)
"""Position of the header's digest in a file."""

UNREADABLE = (CorruptChunk, StoreVersionError, WrongKey)
"""Errors of an object that is there and is not this one, or not readable here."""

_PREFIX = b'{"__metadata__":{"header":"'
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}
# what bytes with a matching digest can still raise if they were not written here; RuntimeError and
# MemoryError are left out: lack of memory is no damage
_MALFORMED = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class Source(NamedTuple):
    """Bytes that can be read in any order, by several threads at once.

    ``size``: their number. ``read_into`` fills a view with the bytes from a start on; it raises `EOFError` if
    they end early, and `OSError`.
    """

    size: int
    read_into: Callable[[int, memoryview], None]

    @classmethod
    def of(cls, data: bytes) -> Source:
        """Bytes in memory."""

        def read_into(start: int, view: memoryview) -> None:
            if start + len(view) > len(data):
                raise EOFError(f"{len(data)} bytes end before {start + len(view)}")
            view[:] = memoryview(data)[start : start + len(view)]

        return cls(len(data), read_into)

    @classmethod
    def file(cls, descriptor: int, size: int) -> Source:
        """An open file of ``size`` bytes.

        It is read and not mapped: a file truncated under a mapping kills the process, and a page that is
        read from the disk twice need not be the one that was verified.
        """

        def read_into(start: int, view: memoryview) -> None:
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], start + done)
                if not count:
                    raise EOFError(f"the file ends at byte {start + done}, it had {size}")
                done += count

        return cls(size, read_into)


def read_bytes(source: Source, start: int, length: int) -> bytes:
    """``length`` bytes from ``start`` on; fewer at the end. Raises as the source."""
    data = bytearray(max(0, min(length, source.size - start)))
    source.read_into(start, memoryview(data))
    return bytes(data)


def hasher_of(name: str) -> Callable[[], Any]:
    """The constructor of the hash ``name``. `StoreVersionError` for one that is not installed, or is none."""
    if name == "xxh3-128":
        return xxh3_128
    if name == "sha256":
        return hashlib.sha256
    if name == "blake3" and find_spec("blake3") is not None:
        from blake3 import blake3

        return blake3
    raise StoreVersionError(
        f"its tensors are verified by {name!r}: pip install 'kamera-kv[blake3]' reads blake3"
    )


@dataclass(frozen=True)
class Codec:
    """The plain codec: the name of an object is its key. Tiers know objects by name, and bytes by a codec."""

    def name(self, key: str) -> str:
        """The name of the object under ``key`` in every tier: 64 lower-case hex digits."""
        return key

    def encode(self, record: Record, created: float) -> bytes:
        """The file of ``record``. Raises as `parts`."""
        return b"".join(self.parts(record, created))

    def parts(self, record: Record, created: float) -> list[bytes | memoryview]:
        """The bytes of the file of ``record``, which depend on codec and arguments alone (``created`` in s).

        Tensors may be on any device, strided, or share memory. Raises `ValueError` for a record that the
        format cannot hold (a dtype without a safetensors name, info that is not JSON).
        """
        tensors = record.tensors()
        parts = [tensor_bytes(tensors[one]) for one in _order(tensors)]
        name = STRONG_HASH if self.mac_key else HASH
        digests = {"algorithm": name, "pieces": _piece_digests(parts, hasher_of(name))}
        return [self._front(_header_of(record, created, digests), tensors), *parts]

    def read(self, source: Source, name: str, where: str, pool: ThreadPoolExecutor | None = None) -> Held:
        """The object ``name``, every byte verified, its pieces side by side on the threads of ``pool``.

        ``where`` names the bytes in errors. Raises `CorruptChunk` for anything that `encode` did not write
        for that object, `StoreVersionError` for an intact object of another format, or under a hash that is
        not installed, and `OSError` as the source. No thread reads on after this returns or raises.
        """
        plain = self._plain(source, name, where)
        with _refusing(where):
            front = self._read_front(plain, where)
            outer, header = self._verified(front, where)
            self._check_name(header["key"], name, where)
            # shapes without memory: all is checked before memory is allocated
            made = record_of(header, {name: _empty(entry) for name, entry in outer.items()})
            tensors, digests = made.tensors(), header["digests"]
            # one record has one header: whatever else it says, and in whatever other way, is refused
            if self._front(_header_of(made, header["created"], digests), tensors) != front:
                raise ValueError("its header is not the one that is written for it")
            size = sum(tensor.nbytes for tensor in tensors.values())
            if len(front) + size != plain.size:
                raise ValueError(f"{plain.size} bytes, its header tells of {len(front) + size}")
            pieces, hasher = digests["pieces"], hasher_of(digests["algorithm"])
            if len(digests) > 2 or len(pieces) != len(range(0, size, PIECE)):
                raise ValueError(f"{len(pieces)} digests of {size} bytes of tensors")
            memory = allocate_bytes(size)

            def fill(number: int) -> None:
                start = number * PIECE
                view = memory.numpy().data[start : start + PIECE]
                plain.read_into(len(front) + start, view)
                done = hasher()
                done.update(view)
                if not hmac.compare_digest(done.hexdigest(), pieces[number]):
                    change = f"bytes {start} to {start + len(view)} of its tensors have changed"
                    raise CorruptChunk(f"{where}: the digest does not match, {change}")

            _each(fill, len(pieces), pool)
            filled, at = {}, 0
            for part in _order(tensors):
                shape, end = tensors[part].shape, at + tensors[part].nbytes
                empty = torch.empty(shape, dtype=tensors[part].dtype) if at == end else None
                filled[part] = (
                    memory[at:end].view(tensors[part].dtype).reshape(shape) if empty is None else empty
                )
                at = end
            return Held(record_of(header, filled), ObjectInfo.of(header, source.size, name))

    def decode(self, data: bytes, name: str, where: str) -> Record:
        """The record in ``data``; otherwise as `read`."""
        return self.read(Source.of(data), name, where).record

    def read_header(self, source: Source, name: str, where: str) -> Header:
        """The verified header of object ``name``: good for listing, never for serving. Raises as `read`."""
        plain = self._plain(source, name, where)
        with _refusing(where):
            _, header = self._verified(self._read_front(plain, where), where)
        self._check_name(header["key"], name, where)
        return header

    def read_info(self, source: Source, name: str, where: str) -> ObjectInfo:
        """What `read_header` says, as a row."""
        return ObjectInfo.of(self.read_header(source, name, where), source.size, name)

    def describe(self, record: Record, created: float, size: int) -> ObjectInfo:
        """The info that `read_info` returns for the file of ``record``."""
        return ObjectInfo.of(_header_of(record, created, {}), size, self.name(record.key))

    @property
    def mac_key(self) -> bytes:
        """The key of the headers' digests (up to 64 bytes); without one anybody can make them."""
        return b""

    @property
    def marker(self) -> dict[str, Any]:
        """The content of `kamera-store.json` in a directory of such objects."""
        return {"format": DIRECTORY_VERSION}

    def sign(self, text: str) -> str:
        """A digest of a text, by which one that was not written here is detected."""
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def seal_id(self, text: str) -> str:
        """The form of a text in the index; equal ones have equal forms, so that the index can search them."""
        return text

    def open_id(self, text: str) -> str:
        """The inverse of `seal_id`."""
        return text

    def _plain(self, source: Source, name: str, where: str) -> Source:
        """The object ``name`` as it was before it was encrypted. Raises as `read`, and when it is read."""
        return source

    def _front(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """Length and header of a file. Raises `ValueError` if it is too long, or cannot be written."""
        fields: dict[str, Any] = {"__metadata__": {"header": "0" * 64, "kamera": canonical_json(header)}}
        at = 0
        for name in _order(tensors):
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"tensor {name!r}: {tensor.dtype} cannot be stored")
            offsets = [at, at := at + tensor.nbytes]
            fields[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise ValueError(
                f"a header of {len(text)} bytes is over the limit of {MAX_HEADER}: less in info="
            )
        front = bytearray(len(text).to_bytes(8, "little") + text)
        front[DIGEST] = _digest(front, self.mac_key)
        return bytes(front)

    def _read_front(self, source: Source, where: str) -> bytes:
        """Length and header of a plain object, unverified."""
        return read_bytes(source, 0, front_size(read_bytes(source, 0, DIGEST.stop), source.size, where))

    def _verified(self, front: bytes, where: str) -> tuple[dict[str, Any], Header]:
        """Entries of the tensors and Kamera header of a ``front``, parsed after its digest is verified."""
        if not hmac.compare_digest(front[DIGEST], _digest(front, self.mac_key)):
            if self.mac_key and front[DIGEST] == _digest(front, b""):
                raise ForeignObject(f"{where}: an intact object, but written without this store's secret")
            raise CorruptChunk(f"{where}: the digest does not match, bytes of the header have changed")
        outer = json.loads(front[8:])
        header = json.loads(outer.pop("__metadata__")["kamera"])
        version = header["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"format version {version!r} is none")
        if version != FORMAT_VERSION:
            raise StoreVersionError(
                f"{where}: written in format {version}, this version reads {FORMAT_VERSION} alone: "
                "read it with the kamera that wrote it, or delete it"
            )
        if header["kind"] not in KINDS:
            raise ValueError(f"kind {header['kind']!r} is none of {', '.join(KINDS)}")
        context, chunk_id = Context(**header["context"]), header["chunk_id"]
        behind, base = header.get("antecedents", ()), header.get("base", "")
        key, info = object_key(header["kind"], context, chunk_id, behind, base), ObjectInfo.of(header, 0, "")
        if key != header["key"]:
            raise ValueError(f"key {header['key']} is not that of its own fields, {key}")
        # fields that a listing shows; they are compared with the tensors when those are read
        if not (is_count(info.tokens) and (info.rank is None or is_count(info.rank))):
            raise ValueError(f"tokens {info.tokens!r} and rank {info.rank!r} must be counts")
        if not (isinstance(info.created, float) or is_count(info.created)):
            raise ValueError(f"created must be seconds, got {info.created!r}")
        if not isinstance(info.base, str) or not is_count(info.behind):
            raise ValueError(f"it stands on {info.base!r} behind {info.behind!r} tokens")
        if not isinstance(info.formed, str | None):
            raise ValueError(f"formed must be text, got {info.formed!r}")
        return outer, dict(header)

    def _check_name(self, key: str, name: str, where: str) -> None:
        if self.name(key) != name:
            raise CorruptChunk(f"{where}: it is of object {self.name(key)}, expected {name}")


def front_size(first: bytes, total: int, where: str) -> int:
    """Bytes of length and header in a file of ``total`` bytes, by its ``first`` 99. Raises `CorruptChunk`."""
    if total < DIGEST.stop:
        raise CorruptChunk(f"{where}: truncated, {total} bytes cannot hold a header")
    size = int.from_bytes(first[:8], "little")
    if size > min(total - 8, MAX_HEADER) or size < DIGEST.stop - 8:
        raise CorruptChunk(f"{where}: impossible header length {size} in {total} bytes")
    if first[8 : DIGEST.start] != _PREFIX:
        raise CorruptChunk(f"{where}: no digest at its place, this is no object of a store")
    return 8 + size


def allocate_bytes(size: int) -> torch.Tensor:
    """``size`` uninitialised bytes, uint8; NumPy asks the system for huge pages, torch does not."""
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


def _header_of(record: Record, created: float, digests: Mapping[str, Any]) -> Header:
    return {"format": FORMAT_VERSION, "created": created, **record.header(), "digests": dict(digests)}


def _order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The tensors as a file has them: widest first, so that each starts at a multiple of its element size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _empty(entry: Mapping[str, Any]) -> torch.Tensor:
    """A tensor without memory, as an entry of a header says it. Raises an error of `_MALFORMED`."""
    try:
        return torch.empty(entry["shape"], dtype=_TORCH[entry["dtype"]], device="meta")
    except RuntimeError as error:
        raise ValueError(f"a shape is impossible: {error}") from error


def _piece_digests(parts: Iterable[memoryview], begin: Callable[[], Any]) -> list[str]:
    """The digest of each piece of these bytes, one behind another."""
    digests: list[str] = []
    hasher, room = begin(), PIECE
    for view in parts:
        while len(view):
            size = min(len(view), room)
            hasher.update(view[:size])
            view, room = view[size:], room - size
            if not room:
                digests.append(hasher.hexdigest())
                hasher, room = begin(), PIECE
    return digests if room == PIECE else [*digests, hasher.hexdigest()]


def _each(work: Callable[[int], None], count: int, pool: ThreadPoolExecutor | None) -> None:
    """``work`` of each number below ``count``; afterwards, error or not, no thread is at it."""
    futures: list[Future[None]] = []
    try:
        for number in range(count):
            if pool is None or count == 1:
                work(number)
                continue
            try:
                futures.append(pool.submit(work, number))
            except RuntimeError as error:
                if "shutdown" not in str(error):
                    raise  # no thread was to be had for it: it is queued all the same
                work(number)  # the store is being closed
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def _digest(front: Sequence[int], mac_key: bytes) -> bytes:
    data = bytes(front)
    hasher = hashlib.blake2b(data[: DIGEST.start], digest_size=32, key=mac_key)
    hasher.update(b"0" * 64)
    hasher.update(data[DIGEST.stop :])
    return hasher.hexdigest().encode()


@contextlib.contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Inside, whatever is wrong with the bytes at ``where`` is `CorruptChunk`."""
    try:
        yield
    except EOFError as error:
        raise CorruptChunk(f"{where}: truncated: {error}") from error
    except KeyError as error:
        raise CorruptChunk(f"{where}: {error} is missing") from error
    except _MALFORMED as error:
        raise CorruptChunk(f"{where}: {error}") from error
