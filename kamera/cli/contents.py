"""Read-only contents of a store, of one of its objects, or of a saved window."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.files import Folder, NotAFile
from kamera.ops import CodedKV, Codes, kv_bytes
from kamera.store import CanonicalRecord, Context, PatchRecord, canonical_key
from kamera.store.format import Codec, Source
from kamera.store.keys import PATCH_KINDS, is_key, whole_id
from kamera.window import WINDOW, refuse_malformed

Document = dict[str, Any]


def object_files(store: Path) -> list[Path]:
    """The object files of a store directory."""
    return [p for p in sorted(store.glob("objects/*.safetensors")) if is_key(p.stem)]


def files_of(store: Path, start: str) -> list[Path]:
    """The object files of the key or the chunk with the prefix ``start``.

    Raises `UnknownChunk` and `AmbiguousId`.
    """
    files = {path: {path.stem} for path in object_files(store)}
    for path, names in files.items():
        with (
            contextlib.suppress(CorruptChunk, StoreVersionError, NotAFile),
            Folder.at(path.parent) as folder,
            folder.reading(path.name) as (descriptor, status),
        ):
            file = Source.file(descriptor, status.st_size)
            names.add(Codec().read_info(file, path.stem, str(path)).chunk_id)
    whole = whole_id(start, (name for names in files.values() for name in names), "object or chunk")
    return [path for path, names in files.items() if whole in names]


def read_object(path: Path) -> Document:
    """One object file: its header, a summary of its tensors, and the result of its verification.

    A damaged file is reported (``intact`` false, ``error``) and not moved.
    """
    try:
        with Folder.at(path.parent) as folder:
            data, _ = folder.read(path.name)
    except NotAFile as refusal:
        return _damage_of(str(path), path.lstat().st_size, refusal)
    key = path.name.split(".")[0]  # a file in quarantine has a time after its key
    if not is_key(key):
        error = f"{path.name!r} is not an object's name: it should be KEY.safetensors"
        return _damage_of(str(path), len(data), error)
    return describe(data, key, str(path))


def describe(data: bytes, name: str, path: str, codec: Codec | None = None) -> Document:
    """`read_object` for the bytes of the object ``name``, decoded by ``codec`` (None: the plain one)."""
    codec = codec or Codec()
    try:
        record = codec.decode(data, name, path)
        info = codec.read_info(Source.of(data), name, path)
    except (CorruptChunk, StoreVersionError, WrongKey) as error:
        return _damage_of(path, len(data), error)
    about = dict(record.info)
    document: Document = {"path": path, "intact": True, **asdict(info), "info": about}
    document |= {"energy": about.get("energy"), "kv_bytes": None, "percent_of_kv": None}
    if isinstance(record, CanonicalRecord):
        values = record.kv.dense() if isinstance(record.kv, CodedKV) else record.kv
        layers = [dict(layer) for layer in values]
        document["kv_bytes"] = kv_bytes(values)
        coded = record.kv.nbytes if isinstance(record.kv, CodedKV) else document["kv_bytes"]
        document["percent_of_kv"] = 100.0 * coded / document["kv_bytes"] if document["kv_bytes"] else 100.0
        document["loss"] = None if record.loss is None else asdict(record.loss)
    else:
        layers = [_factors(layer) for layer in record.patch.layers] if isinstance(record, PatchRecord) else []
    document["layers"] = len(layers)
    document["channels"] = _channels(layers)
    document["tensor_bytes"] = record.nbytes
    document["dtype"] = next((c["dtype"] for c in document["channels"].values()), None)
    return document


def _damage_of(path: str, size: int, error: object) -> Document:
    return {"path": path, "bytes": size, "intact": False, "error": str(error)}


def add_relative_sizes(objects: list[Document], store: Path | None, codec: Codec | None = None) -> None:
    """Add the size of each intact patch relative to its chunk's KV, if the canonical is available.

    ``codec`` names the objects (None: the plain one).
    """
    codec = codec or Codec()
    sizes = {o["key"]: o["kv_bytes"] for o in objects if o["intact"] and o["kind"] == "canonical"}
    for patch in objects:
        if not patch["intact"] or patch["kind"] not in PATCH_KINDS:
            continue
        own = patch["context"] | {"anchor": patch["base"] or patch["context"]["anchor"]}
        key = codec.name(canonical_key(Context(**own), patch["chunk_id"]))
        if key not in sizes and store is not None:
            path = store / "objects" / f"{key}.safetensors"
            sizes[key] = read_object(path).get("kv_bytes") if path.is_file() else None
        patch["kv_bytes"] = sizes.get(key)
        if patch["kv_bytes"]:
            patch["percent_of_kv"] = 100.0 * patch["tensor_bytes"] / patch["kv_bytes"]


def read_window(directory: Path) -> Document:
    """A saved window, verified against its digests. Raises CorruptChunk or StoreVersionError."""
    header, tensors = WINDOW.read(directory)
    with refuse_malformed(directory / WINDOW.name):
        chunks = []
        for i, (seat, chunk) in enumerate(zip(header["seats"]["seats"], header["chunks"], strict=True)):
            sources = {"copy": seat["source"], "clean": seat["clean"]}
            copies = {
                name: {**sources[name], **_copy(tensors, f"{i:05d}/{name}/", headers)}
                for name, headers in chunk["copies"].items()
            }
            entries = {name: seat[name] for name in ("chunk_id", "guarantee", "formed", "archived")}
            chunks.append({**entries, "label": chunk["label"], "tokens": seat["length"], "copies": copies})
        return {
            "path": str(directory),
            "kind": "window",
            "intact": True,
            **{k: v for k, v in header.items() if k not in ("chunks", "seats")},
            "anchor_tokens": tensors["anchor/ids"].shape[0],
            "tokens": tensors["anchor/ids"].shape[0] + sum(c["tokens"] for c in chunks),
            "bytes": sum(t.nbytes for t in tensors.values()),
            "chunks": chunks,
        }


def _copy(tensors: Mapping[str, torch.Tensor], prefix: str, headers: Mapping[str, Any]) -> Document:
    """What the file holds of a copy; ``headers`` are those of its KV and patch."""
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    record, patch, patch_bytes = CanonicalRecord.from_parts(headers["kv"], own), None, 0
    layers = [dict(layer) for layer in record.kv]
    if "patch" in headers:
        patch = PatchRecord.from_parts(headers["patch"], own).patch
        patch_bytes = patch.nbytes
    size = record.kv.nbytes if isinstance(record.kv, CodedKV) else kv_bytes(record.kv)
    return {
        "layers": len(layers),
        "channels": _channels(layers),
        "kv_bytes": size,
        "rank": None if patch is None else patch.rank,
        "patch_bytes": patch_bytes,
        "percent_of_kv": 100.0 * patch_bytes / size if patch and size else None,
    }


def _factors(layer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    sides = ("left", "right")
    factors = {f"{name}/{side}": getattr(low, side) for name, low in layer.items() for side in sides}
    return {name: factor.codes if isinstance(factor, Codes) else factor for name, factor in factors.items()}


def _channels(layers: list[dict[str, torch.Tensor]]) -> dict[str, Document]:
    """Shapes and dtype of each channel, over the layers that have it."""
    channels: dict[str, Document] = {}
    for layer in layers:
        for name, tensor in layer.items():
            shape = list(tensor.shape)
            kind = str(tensor.dtype).removeprefix("torch.")
            entry = channels.setdefault(name, {"dtype": kind, "shapes": [], "layers": 0})
            entry["layers"] += 1
            if shape not in entry["shapes"]:
                entry["shapes"].append(shape)
    return channels
