"""Save a window and bring it back bit for bit: one safetensors file, read as a whole or refused by name.

Everything is in one file, so that one rename publishes it: a reader sees the old one or the new one, a
concurrent save replaces it with another whole one, and a process that dies midway leaves the old one.

Its metadata is the seal, at a fixed place in the file: the SHA-256 of all bytes of the file, with 64 zeros in
place of the seal. It is verified before anything in the file is parsed. One tensor is the document, as JSON.
No pickle. Sessions are saved in such files, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import cattrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kamera.content import Encoded
from kamera.engines import Engine, Span
from kamera.errors import CorruptChunk, IncompatibleChunk, KameraError, StoreError, StoreVersionError
from kamera.files import ASIDE, publish_file
from kamera.ops import CodedKV
from kamera.patches import Former, Losses, anchor_of
from kamera.store import CanonicalRecord, ChunkStore, Folder, NotAFile, PatchRecord
from kamera.trust import ReusePolicy
from kamera.window.plan import converter
from kamera.window.run import Executor
from kamera.window.slots import Resident, Seat, Seats, WindowState, new_number

_ZEROS, _DOCUMENT = "0" * 64, "document"

_MALFORMED = (
    cattrs.BaseValidationError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)

Tensors = dict[str, torch.Tensor]


class Saved(NamedTuple):
    """The content of a file: the document that describes a window or a session, and its tensors."""

    document: Any
    tensors: Tensors


@dataclass(frozen=True)
class SealedFile:
    """A ``kind`` of file, in a directory of its own; ``version`` is the only format that is read.

    ``beside`` are patterns of what else is in such a directory.
    """

    kind: str
    version: int
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        return f"{self.kind}.safetensors"

    def publish(self, path: Path, saved: Saved) -> str:
        """Write the file into ``path`` in one step, in place of the one that is there; its digest.

        Raises StoreError if the operating system refuses, or as `check_folder`; the old one stays then.
        """
        plain = {name: t.detach().cpu().contiguous().clone() for name, t in saved.tensors.items()}
        text = torch.frombuffer(bytearray(json.dumps(saved.document).encode()), dtype=torch.uint8)
        data = save({**plain, _DOCUMENT: text}, {self.kind: _ZEROS})
        assert self._is_ours(data), "safetensors writes the metadata first"
        digest, view = self._digest(data), memoryview(data)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.check_folder(path)
            with publish_file(path / self.name, 0o666) as file:
                file.writelines((view[: self._seal.start], digest.encode(), view[self._seal.stop :]))
        except OSError as error:
            raise StoreError(f"the {self.kind} cannot be saved at {str(path)!r}: {error}") from None
        return digest

    def read(self, path: Path, digest: str | None = None) -> Saved:
        """The one saved in the directory ``path``, every byte verified.

        Raises StoreError if there is none or no file in its place, CorruptChunk if it is damaged or has
        another ``digest``, StoreVersionError if it has another format.
        """
        where = path / self.name
        try:
            with Folder.at(path) as folder:
                data, _ = folder.read(self.name)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"no saved {self.kind} at {str(path)!r}: it has no {self.name}") from None
        except OSError as error:
            raise StoreError(f"{str(where)!r} cannot be read: {error}") from None
        if not self._is_ours(data):
            raise CorruptChunk(
                f"{str(where)!r} is damaged, or no {self.kind} of Kamera's: it does not say that it is one"
            )
        seal = data[self._seal].decode(errors="replace")
        if seal != self._digest(data):
            raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
        if digest not in (None, seal):
            raise CorruptChunk(f"{str(where)!r} is another {self.kind} than the one that was saved there")
        with refuse_malformed(where):
            tensors = load(data)
            document = json.loads(tensors.pop(_DOCUMENT).numpy().tobytes())
            version = document["version"]
        if version != self.version:
            newer = isinstance(version, int) and version > self.version
            raise StoreVersionError(
                f"{str(where)!r} is of {self.kind} format {version}, this version reads {self.version}: "
                + ("upgrade kamera" if newer else "open it with the version that wrote it and save it again")
            )
        return Saved(document, tensors)

    def check_folder(self, path: Path) -> None:
        """Raise StoreError unless the directory is empty or holds such a file, damaged or not."""
        with Folder.at(path) as folder:
            beside = (*self.beside, f"{ASIDE}*")
            other = [n for n in folder.names() if not any(fnmatchcase(n, own) for own in beside)]
            if self.name in other:  # it alone tells whose the directory is
                other = [self.name]
                with contextlib.suppress(NotAFile), folder.reading(self.name) as (descriptor, _):
                    other = [] if self._is_ours(os.read(descriptor, self._seal.start)) else other
        if other:
            raise StoreError(
                f"{str(path)!r} is no saved {self.kind}'s: it holds {other[0]!r}; give a new or an empty "
                "directory"
            )

    # -- inside --------------------------------------------------------------------------------

    @property
    def _prefix(self) -> bytes:
        return b'{"__metadata__":{"%s":"' % self.kind.encode()

    @property
    def _seal(self) -> slice:
        """Its place in the file."""
        start = 8 + len(self._prefix)
        return slice(start, start + len(_ZEROS))

    def _is_ours(self, front: bytes) -> bool:
        return front[8 : self._seal.start] == self._prefix

    def _digest(self, data: bytes) -> str:
        """SHA-256 of ``data`` with zeros in place of the seal."""
        view = memoryview(data)
        hasher = hashlib.sha256(view[: self._seal.start])
        hasher.update(_ZEROS.encode())
        hasher.update(view[self._seal.stop :])
        return hasher.hexdigest()


WINDOW = SealedFile("window", 1)
"""The file of a saved window."""


@contextlib.contextmanager
def refuse_malformed(where: Path) -> Iterator[None]:
    """Context that reads a document whose digest is right: raises CorruptChunk if it says what none says."""
    try:
        yield
    except KameraError:
        raise
    except _MALFORMED as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise CorruptChunk(f"{str(where)!r} is malformed ({text}): remove it") from None


def save_window(path: Path, executor: Executor, state: WindowState, policy: ReusePolicy) -> str:
    """Write a window to the directory ``path``, as `SealedFile.publish` does; its digest."""
    former, chunks = executor.former, list[dict[str, Any]]()
    tensors: Tensors = {"anchor/ids": former.anchor.input_ids}
    for i, (encoded, resident) in enumerate(zip(state.encoded, state.residents, strict=True)):
        copies = {"copy": resident.span} | ({} if resident.clean is None else {"clean": resident.clean})
        headers = {k: _put_copy(tensors, f"{i:05d}/{k}", former, encoded, span) for k, span in copies.items()}
        tensors |= {f"{i:05d}/embeds/{name}": tensor for name, tensor in encoded.tensors.items()}
        chunks.append({"label": encoded.label, "copies": headers})
    document = {
        "version": WINDOW.version,
        "fingerprint": former.context.fingerprint,
        "tenant": former.context.tenant,
        "policy": policy.to_info(),
        "max_tokens": executor.max_tokens,
        "tail": former.anchor.tail,
        "reopen": former.anchor.reopen,
        "seats": converter().unstructure(state.seats.with_said(None)),
        "chunks": chunks,
    }
    return WINDOW.publish(path, Saved(document, tensors))


def load_window(
    path: Path,
    backbone: Engine,
    store: ChunkStore,
    digest: str | None = None,
) -> tuple[ReusePolicy, Executor, WindowState]:
    """Read a saved window; its anchor is read from the store, or prefilled again.

    Raises CorruptChunk for another file than that of ``digest``. Each chunk is restored as it was.
    """
    where = path / WINDOW.name
    document, tensors = WINDOW.read(path, digest)
    with refuse_malformed(where):
        made_by, tenant = str(document["fingerprint"]), document["tenant"]
        policy = ReusePolicy(**document["policy"])
        max_tokens = document["max_tokens"]
        anchor_parts = (tensors["anchor/ids"], document["tail"], document["reopen"])
    if made_by != backbone.fingerprint:
        raise IncompatibleChunk(
            f"the window at {str(path)!r} was made by backbone {made_by[:12]}, this is "
            f"{backbone.fingerprint[:12]}: load it with the backbone it was made by"
        )
    if tenant != store.tenant:
        raise IncompatibleChunk(
            f"the window at {str(path)!r} belongs to tenant {tenant!r}, the store to "
            f"{store.tenant!r}: open the store with that tenant"
        )
    losses = Losses()
    anchor = anchor_of(backbone, *anchor_parts, store, losses, later=True)
    executor = Executor.of(backbone, store, anchor, policy, losses, max_tokens)
    former = executor.former
    with refuse_malformed(where):
        seats = converter().structure(document["seats"], Seats)
        has = former.catalogue.is_archived  # the store may be another than the one they were archived in
        row = [replace(s, archived=s.archived and has(s.chunk_id), number=new_number()) for s in seats.seats]
        pairs = enumerate(zip(document["chunks"], row, strict=True))
        residents = {
            seat.number: _get_resident(tensors, f"{i:05d}", chunk, seat, executor)
            for i, (chunk, seat) in pairs
        }
        if [seat.shown.home.shift(seat.offset) for seat in row] != [seat.spot for seat in row]:
            raise ValueError("a chunk does not stand where it is said")
        state = WindowState(replace(seats, seats=tuple(row)), residents)
    return policy, executor, state


def _put_copy(tensors: Tensors, name: str, former: Former, encoded: Encoded, span: Span) -> dict[str, Any]:
    """The headers of a span's KV and patch as the store writes them; their tensors go under ``name``."""
    own = former.context
    context = own if isinstance(span.kv, CodedKV) else replace(own, kv="as-is")
    values = (encoded.chunk_id, context, encoded.input_ids, span.positions, span.kv, encoded.position_inputs)
    records: dict[str, CanonicalRecord | PatchRecord] = {"kv": CanonicalRecord(*values)}
    if span.patch is not None:
        records["patch"] = PatchRecord(encoded.chunk_id, context, (), "exact", span.patch, "exact")
    for record in records.values():
        tensors |= {f"{name}/{part}": tensor for part, tensor in record.tensors().items()}
    return {part: record.header() for part, record in records.items()}


def _get_resident(
    tensors: Tensors, name: str, chunk: Mapping[str, Any], seat: Seat, executor: Executor
) -> Resident:
    embeds, copies = _under(tensors, f"{name}/embeds/"), dict[str, Span]()
    for role, source in {"copy": seat.source, "clean": seat.clean}.items():
        if source is None:
            continue
        headers, own = chunk["copies"][role], _under(tensors, f"{name}/{role}/")
        record = CanonicalRecord.from_parts(headers["kv"], own)
        patch = PatchRecord.from_parts(headers["patch"], own).patch if source.patch else None
        encoded = Encoded(record.input_ids, record.inputs, embeds, seat.chunk_id, chunk["label"])
        if (record.tokens, executor.spots.spot(encoded, record.positions)) != (seat.length, source.home):
            raise ValueError(f"the {role} of chunk {seat.chunk_id[:12]} was not computed where it is said")
        kv = executor.former.backbone.place(record.kv)
        copies[role] = Span.computed(kv, record.positions, patch, lossy=source.lossy)
    return Resident(encoded, copies["copy"], copies.get("clean"))


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
