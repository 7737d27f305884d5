"""Save a window and bring it back bit for bit: one safetensors file, one JSON file, no pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kamera.backbones import Backbone, Encoded
from kamera.errors import CorruptChunk, IncompatibleChunk, StoreError, StoreVersionError
from kamera.ops import KV, CodedKV, LowRank, Patch
from kamera.store import ChunkStore
from kamera.store.coded import coded_header, coded_kv, coded_tensors
from kamera.window.anchor import anchor_of
from kamera.window.certificate import Certificate
from kamera.window.certified import Terms, agree
from kamera.window.deque import Deque
from kamera.window.forming import FormingRule, forming_of
from kamera.window.policy import ReusePolicy
from kamera.window.report import Tally
from kamera.window.serving import Server
from kamera.window.slots import Copy, Facts, Resident
from kamera.window.state import WindowState

VERSION = 3
_JSON, _TENSORS = "window.json", "window.safetensors"

Tensors = dict[str, torch.Tensor]


def save_window(path: Path, server: Server, deque: Deque, state: WindowState, asked: ReusePolicy) -> None:
    """Write ``path``/window.json and ``path``/window.safetensors, each replaced atomically.

    ``asked`` is the policy the window was opened with, whatever a certificate let it serve.

    The JSON holds the SHA-256 of the tensors and is written last: a killed save leaves the old
    window, or one that is refused.
    """
    tensors: Tensors = {"anchor/ids": server.anchor.input_ids}
    chunks = [_put_resident(tensors, f"{i:05d}", resident) for i, resident in enumerate(state.residents)]
    document = {
        # what a reader does not know of must not be served: neither frames nor codes by one of version 1
        "version": VERSION if any(state.frame) or _lossy(chunks) else 1,
        "fingerprint": server.context.fingerprint,
        "tenant": server.context.tenant,
        "policy": asdict(asked),
        "max_tokens": deque.max_tokens,
        "positions": deque.rule,
        "tail": server.anchor.tail,
        "reopen": server.anchor.reopen,
        "shift": list(state.shift),
        "frame": list(state.frame),
        "chunks": chunks,
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        temporary = path / (_TENSORS + ".tmp")
        plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        save_file(plain, temporary)
        document["tensors_sha256"] = hashlib.sha256(temporary.read_bytes()).hexdigest()
        os.replace(temporary, path / _TENSORS)
        temporary = path / (_JSON + ".tmp")
        body = json.dumps(document, sort_keys=True)
        seal = hashlib.sha256(body.encode()).hexdigest()
        temporary.write_text(json.dumps({"sha256": seal, "window": body}))
        os.replace(temporary, path / _JSON)
    except OSError as error:
        raise StoreError(f"the window cannot be saved at {str(path)!r}: {error}") from None


def load_window(
    path: Path,
    backbone: Backbone,
    store: ChunkStore,
    certificate: Certificate | str | os.PathLike[str] | None = None,
    forming: FormingRule = "now",
) -> tuple[Terms, Server, Deque, WindowState]:
    """Read a saved window. The anchor is prefilled again; every chunk comes back as it was, or exact
    where nothing certifies any more what it was."""
    document = read_document(path)
    if document["fingerprint"] != backbone.fingerprint:
        raise IncompatibleChunk(
            f"the window at {str(path)!r} was made by backbone {document['fingerprint'][:12]}, this is "
            f"{backbone.fingerprint[:12]}: load it with the backbone it was made by"
        )
    if document["tenant"] != store.tenant:
        raise IncompatibleChunk(
            f"the window at {str(path)!r} belongs to tenant {document['tenant']!r}, the store to "
            f"{store.tenant!r}: open the store with that tenant"
        )
    tensors = read_tensors(path, document["tensors_sha256"])
    anchor = anchor_of(backbone, tensors["anchor/ids"], document["tail"], document["reopen"])
    terms = agree(backbone, store, ReusePolicy(**document["policy"]), certificate)
    server = Server(backbone, store, anchor, terms.served, forming_of(forming))
    residents = tuple(
        _get_resident(tensors, f"{i:05d}", chunk, server) for i, chunk in enumerate(document["chunks"])
    )
    shift = tuple(document["shift"])
    state = WindowState(residents, shift, tuple(document.get("frame", (0,) * len(shift))))
    deque = Deque(server, document["max_tokens"], document["positions"])
    return terms, server, deque, deque.exactly(state, Tally()) if terms.withheld else state


def _lossy(chunks: list[dict[str, Any]]) -> bool:
    return any(copy["lossy"] for chunk in chunks for copy in chunk["copies"].values())


def _put_resident(tensors: Tensors, name: str, resident: Resident) -> dict[str, Any]:
    encoded = resident.facts.encoded
    tensors[f"{name}/ids"] = encoded.input_ids
    tensors[f"{name}/positions"] = resident.positions
    tensors |= {f"{name}/inputs/{k}": v for k, v in encoded.position_inputs.items()}
    tensors |= {f"{name}/embeds/{k}": v for k, v in encoded.tensors.items()}
    copies = {"copy": resident.copy} | ({} if resident.clean is None else {"clean": resident.clean})
    return {
        "chunk_id": resident.facts.chunk_id,
        "label": resident.facts.label,
        "guarantee": resident.guarantee,
        "formed": resident.formed,
        "archived": resident.archived,
        "copies": {k: _put_copy(tensors, f"{name}/{k}", c) for k, c in copies.items()},
    }


def _put_copy(tensors: Tensors, name: str, copy: Copy) -> dict[str, Any]:
    tensors[f"{name}/positions"] = copy.positions
    coded = copy.kv if isinstance(copy.kv, CodedKV) else None
    for i, held in enumerate(() if coded is None else coded.layers):
        for channel, codes in held.items():
            tensors |= {f"{name}/kv/{i:05d}/{channel}/{part}": t for part, t in coded_tensors(codes)}
    for i, layer in enumerate(copy.kv if coded is None else ()):
        tensors |= {f"{name}/kv/{i:05d}/{channel}": t for channel, t in layer.items()}
    if copy.patch is not None:
        for i, factors in enumerate(copy.patch.layers):
            for channel, low in factors.items():
                where = f"{name}/patch/{i:05d}/{channel}"
                tensors |= {f"{where}/{factor}": t for factor, t in low.tensors().items()}
    return {
        "guarantee": copy.guarantee,
        "antecedents": list(copy.antecedents),
        "canonical": copy.canonical,
        "lossy": copy.lossy,
        "coded": None if coded is None else coded_header(coded),
        "patched": copy.patch is not None,
    }


def _get_resident(tensors: Tensors, name: str, chunk: dict[str, Any], server: Server) -> Resident:
    encoded = Encoded(
        tensors[f"{name}/ids"],
        _under(tensors, f"{name}/inputs/"),
        _under(tensors, f"{name}/embeds/"),
    )
    facts = Facts(chunk["chunk_id"], encoded, chunk["label"])
    copies = {k: _get_copy(tensors, f"{name}/{k}", c, server) for k, c in chunk["copies"].items()}
    return Resident(
        facts,
        copies["copy"],
        tensors[f"{name}/positions"],
        chunk["guarantee"],
        formed=chunk["formed"],
        # the store may be another than the one it was archived in
        archived=chunk["archived"] and server.store.has_canonical(server.context, facts.chunk_id),
        clean=copies.get("clean"),
    )


def _get_copy(tensors: Tensors, name: str, copy: dict[str, Any], server: Server) -> Copy:
    layers, positions = range(len(server.backbone.layout)), tensors[f"{name}/positions"]
    if copy.get("coded") is None:
        kv: KV = tuple(_under(tensors, f"{name}/kv/{i:05d}/") for i in layers)
    else:
        channels = {i: [c.name for c in spec.channels] for i, spec in enumerate(server.backbone.layout)}
        kv = coded_kv(copy["coded"], channels, _under(tensors, f"{name}/"), positions.shape[1])
    patch = None
    if copy["patched"]:
        factors = []
        for i in layers:
            held = _under(tensors, f"{name}/patch/{i:05d}/")
            patched = sorted({k.rsplit("/", 1)[0] for k in held})
            factors.append({c: LowRank.from_tensors(_under(held, f"{c}/")) for c in patched})
        patch = Patch(tuple(factors))
    return Copy(
        server.backbone.place(kv),
        positions,
        patch,
        copy["guarantee"],
        tuple(copy["antecedents"]),
        copy["canonical"],
        copy.get("lossy", False),
    )


def _under(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def read_document(path: Path) -> dict[str, Any]:
    """The JSON of a saved window, its seal checked. Raises StoreError, CorruptChunk, StoreVersionError."""
    where = path / _JSON
    try:
        sealed = json.loads(where.read_text())
        body = sealed["window"]
        intact = hashlib.sha256(body.encode()).hexdigest() == sealed["sha256"]
        document: dict[str, Any] = json.loads(body)
    except FileNotFoundError:
        raise StoreError(f"no saved window at {str(path)!r}: it has no {_JSON}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptChunk(f"{str(where)!r} is damaged: {error}") from None
    if not intact:
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
    if document["version"] > VERSION:
        raise StoreVersionError(
            f"{str(where)!r} is of window format {document['version']}, this version reads up to "
            f"{VERSION}: upgrade kamera"
        )
    return document


def read_tensors(path: Path, expected: str) -> Tensors:
    """The tensors of a saved window, whose SHA-256 must be ``expected``. Raises CorruptChunk."""
    where = path / _TENSORS
    try:
        intact = hashlib.sha256(where.read_bytes()).hexdigest() == expected
        tensors: Tensors = load_file(where)
    except (OSError, SafetensorError) as error:
        raise CorruptChunk(f"{str(where)!r} cannot be read: {error}") from None
    if not intact:
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match {_JSON}")
    return tensors
