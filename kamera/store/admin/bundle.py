"""Bundles: chunks, patches and certificates in one file, each verified on import.

The objects of a bundle are plain and of no tenant, whichever store exported them. A store imports them
under its own tenant, names, secret and keys. `docs/store-format.md` specifies the file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kamera.errors import CorruptChunk, StoreVersionError, UnknownChunk, WrongKey
from kamera.files import published
from kamera.store.admin.archive import CERTIFICATE, OBJECT, BundleFile, Unfit, opened, written
from kamera.store.codec import Codec
from kamera.store.info import ObjectInfo, Progress
from kamera.store.keys import PATCH_KINDS
from kamera.store.records import Record

if TYPE_CHECKING:
    from kamera.store.store import ChunkStore

_CERTIFICATE_LIMIT = 2**20  # bytes
_COUNTED = ("canonicals", "patches", "encodings", "anchors")


@dataclass(frozen=True)
class Exported:
    """The contents of a bundle, and one line for each object left out because it could not be read."""

    path: str
    bytes: int
    canonicals: int
    patches: int
    encodings: int
    anchors: int
    certificates: int
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Imported:
    """The outcome of an import, by member.

    ``canonicals``, ``patches``, ``encodings``, ``anchors``, ``certificates``: numbers of those that are new.
    ``present``: number of those that were stored already and stayed unchanged. ``refused``: one line, member
    and reason, for each of the others.
    """

    canonicals: int
    patches: int
    encodings: int
    anchors: int
    certificates: int
    present: int
    refused: tuple[str, ...]


def export_bundle(
    store: ChunkStore,
    path: str | os.PathLike[str],
    chunks: Sequence[str] | None,
    certificates: bool,
    progress: Progress,
) -> Exported:
    """`StoreAdmin.export_bundle`."""
    chosen = _chosen(store, chunks)
    refused: list[str] = []
    counts: Counter[str] = Counter()
    with written(Path(path)) as add:
        for done, info in enumerate(chosen, 1):
            try:
                record = store._look_up(info.key)
            except (CorruptChunk, StoreVersionError, WrongKey) as error:
                refused.append(str(error))
                record = None
            if record is not None:  # it may have been deleted since it was listed
                record = _of_tenant(record, "")
                data = Codec().encode(record, info.created)
                add(f"objects/{record.key}.safetensors", data)
                counts[_plural(record)] += 1
            progress(done, len(chosen))
        if certificates:
            for name, data in _certificates(store, {info.context.fingerprint for info in chosen}):
                add(f"certificates/{name}", data)
                counts["certificates"] += 1
    return Exported(
        path=str(path),
        bytes=os.stat(path).st_size,
        **{kind: counts[kind] for kind in _COUNTED},
        certificates=counts["certificates"],
        refused=tuple(refused),
    )


def import_bundle(
    store: ChunkStore, path: str | os.PathLike[str], certificates: bool, progress: Progress
) -> Imported:
    """`StoreAdmin.import_bundle`."""
    counts: Counter[str] = Counter()
    with opened(Path(path)) as bundle:
        refused = dict(bundle.refused)
        objects = [name for name in bundle.names if OBJECT.fullmatch(name)]
        for done, name in enumerate(objects, 1):
            try:
                counts[_put(store, _record(bundle, name))] += 1
            except (CorruptChunk, StoreVersionError, Unfit) as error:
                refused[name] = str(error).removeprefix(f"{name}: ")
            progress(done, len(objects))
        for name in bundle.names if certificates else ():
            match = CERTIFICATE.fullmatch(name)
            try:
                if match is not None:
                    counts[_put_certificate(store, match.group(1), bundle.read(name))] += 1
            except Unfit as error:
                refused[name] = str(error)
    return Imported(
        **{kind: counts[kind] for kind in _COUNTED},
        certificates=counts["certificates"],
        present=counts["present"],
        # an imported name may contain anything
        refused=tuple(f"{name!r}: {why}" for name, why in sorted(refused.items())),
    )


def certificate_folders(store: ChunkStore) -> tuple[Path, ...]:
    """Folders for certificates that came with a store, its tenant's own first; none in memory."""
    tiers = store._tiers
    if tiers.disk is None:
        return ()
    roots = [tiers.disk.root, *([] if tiers.remote else [Path(store.url)])]
    return tuple(dict.fromkeys(root / "certificates" for root in roots))


def _chosen(store: ChunkStore, chunks: Sequence[str] | None) -> list[ObjectInfo]:
    """All objects but what single windows kept; or those of some chunks, and their anchors."""
    listed = [info for info in store.ls() if info.kind != "conditioned"]
    if chunks is None:
        return listed
    wanted = set(chunks)
    missing = wanted - {info.chunk_id for info in listed if info.kind == "canonical"}
    if missing:
        raise UnknownChunk(f"no chunk {min(missing)!r} in {store!r}: nothing was exported")
    mine = [i for i in listed if i.chunk_id in wanted and wanted.issuperset(i.antecedents)]
    behind = {replace(i.context, kv="as-is") for i in mine}
    return [*mine, *(i for i in listed if i.kind == "anchor" and i.context in behind)]


def _record(bundle: BundleFile, name: str) -> Record:
    data = bundle.read(name)
    record = Codec().decode(data, name.partition("/")[2].partition(".")[0], name)
    if record.context.tenant:
        raise Unfit("foreign: it is of a tenant, and the objects of a bundle are of none")
    return record


def _put(store: ChunkStore, record: Record) -> str:
    """Store an object and return the counter to raise: an imported object never replaces a stored one."""
    record = _of_tenant(record, store.tenant)
    if store._tiers.has(store._codec.name(record.key)):
        return "present"
    store.put(record)
    return _plural(record)


def _of_tenant(record: Record, tenant: str) -> Record:
    return replace(record, context=replace(record.context, tenant=tenant))


def _plural(record: Record) -> str:
    return "patches" if record.kind in PATCH_KINDS else f"{record.kind}s"


def _certificates(store: ChunkStore, fingerprints: set[str]) -> Iterator[tuple[str, bytes]]:
    """Certificates of these backbones stored beside the store; links are ignored."""
    backbones = {fingerprint[:16] for fingerprint in fingerprints}
    seen: set[str] = set()
    for path in (path for folder in certificate_folders(store) for path in sorted(folder.glob("*.json"))):
        fits = CERTIFICATE.fullmatch(f"certificates/{path.name}") and not path.is_symlink()
        if fits and path.name[:16] in backbones and path.name not in seen:
            seen.add(path.name)
            yield path.name, path.read_bytes()


def _put_certificate(store: ChunkStore, name: str, data: bytes) -> str:
    """Put it where windows look for it; they judge its validity when they use it."""
    if len(data) > _CERTIFICATE_LIMIT:
        raise Unfit(f"{len(data)} bytes are no certificate")
    folders = certificate_folders(store)
    if not folders:
        raise Unfit("this store has no folder for certificates")
    target = folders[0] / name
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        if not target.exists():
            with published(target) as file:
                file.write(data)
            return "certificates"
        if target.read_bytes() == data:
            return "present"
    except OSError as error:
        raise Unfit(f"it cannot be written: {error}") from None
    raise Unfit("another certificate of this name is here")
