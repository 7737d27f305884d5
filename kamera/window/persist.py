"""Save a window and bring it back bit for bit: one safetensors file (`kamera.window.file`), no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera.content import Encoded
from kamera.engines import Engine
from kamera.errors import IncompatibleChunk
from kamera.ops import CodedKV
from kamera.patches import Copy, Facts, Former, Losses, anchor_of
from kamera.store import CanonicalRecord, ChunkStore, PatchRecord
from kamera.trust import ReusePolicy
from kamera.window.file import WINDOW, Saved, Tensors, refuse_malformed
from kamera.window.seats import Seat, Seats, new_number
from kamera.window.stage import Stage, stage_of
from kamera.window.state import Resident, WindowState
from kamera.window.steps import converter


def save_window(path: Path, stage: Stage, state: WindowState, policy: ReusePolicy) -> str:
    """Write a window to the directory ``path``, as `SealedFile.publish` does; its digest."""
    former, chunks = stage.former, list[dict[str, Any]]()
    tensors: Tensors = {"anchor/ids": former.anchor.input_ids}
    for i, (facts, resident) in enumerate(zip(state.facts, state.residents, strict=True)):
        copies = {"copy": resident.copy} | ({} if resident.clean is None else {"clean": resident.clean})
        headers = {k: _put_copy(tensors, f"{i:05d}/{k}", former, facts, copy) for k, copy in copies.items()}
        tensors |= {f"{i:05d}/embeds/{name}": tensor for name, tensor in facts.encoded.tensors.items()}
        chunks.append({"label": facts.label, "copies": headers})
    document = {
        "version": WINDOW.version,
        "fingerprint": former.context.fingerprint,
        "tenant": former.context.tenant,
        "policy": policy.to_info(),
        "max_tokens": stage.max_tokens,
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
) -> tuple[ReusePolicy, Stage, WindowState]:
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
    stage = stage_of(backbone, store, anchor, policy, losses, max_tokens)
    former = stage.former
    with refuse_malformed(where):
        seats = converter().structure(document["seats"], Seats)
        has = former.catalogue.is_archived  # the store may be another than the one they were archived in
        row = [replace(s, archived=s.archived and has(s.chunk_id), number=new_number()) for s in seats.seats]
        pairs = enumerate(zip(document["chunks"], row, strict=True))
        residents = {
            seat.number: _get_resident(tensors, f"{i:05d}", chunk, seat, stage) for i, (chunk, seat) in pairs
        }
        if [seat.shown.home.shift(seat.offset) for seat in row] != [seat.spot for seat in row]:
            raise ValueError("a chunk does not stand where it is said")
        state = WindowState(replace(seats, seats=tuple(row)), residents)
    return policy, stage, state


def _put_copy(tensors: Tensors, name: str, former: Former, facts: Facts, copy: Copy) -> dict[str, Any]:
    """The headers of a copy's KV and patch as the store writes them; their tensors go under ``name``."""
    own, encoded = former.context, facts.encoded
    context = own if isinstance(copy.kv, CodedKV) else replace(own, kv="as-is")
    values = (facts.chunk_id, context, encoded.input_ids, copy.positions, copy.kv, encoded.position_inputs)
    records: dict[str, CanonicalRecord | PatchRecord] = {"kv": CanonicalRecord(*values)}
    if copy.patch is not None:
        records["patch"] = PatchRecord(facts.chunk_id, context, (), "exact", copy.patch, "exact")
    for record in records.values():
        tensors |= {f"{name}/{part}": tensor for part, tensor in record.tensors().items()}
    return {part: record.header() for part, record in records.items()}


def _get_resident(
    tensors: Tensors, name: str, chunk: Mapping[str, Any], seat: Seat, stage: Stage
) -> Resident:
    embeds, copies = _under(tensors, f"{name}/embeds/"), dict[str, Copy]()
    for role, source in {"copy": seat.source, "clean": seat.clean}.items():
        if source is None:
            continue
        headers, own = chunk["copies"][role], _under(tensors, f"{name}/{role}/")
        record = CanonicalRecord.from_parts(headers["kv"], own)
        patch = PatchRecord.from_parts(headers["patch"], own).patch if source.patch else None
        facts = Facts(seat.chunk_id, Encoded(record.input_ids, record.inputs, embeds), chunk["label"])
        if (record.tokens, stage.spots.spot(facts, record.positions)) != (seat.length, source.home):
            raise ValueError(f"the {role} of chunk {seat.chunk_id[:12]} was not computed where it is said")
        kv = stage.former.backbone.place(record.kv)
        copies[role] = Copy(kv, record.positions, patch, source.lossy)
    return Resident(facts, copies["copy"], copies.get("clean"))


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
