"""Save a window and bring it back bit for bit: one safetensors file (`kamera.window.file`), no pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kamera.content import Encoded
from kamera.engines import Engine
from kamera.errors import IncompatibleChunk
from kamera.ops import KV, Blocks, CodedKV, LowRanks, Patch, SampleSize, check_groups
from kamera.patches import Copy, Facts, Losses, anchor_of
from kamera.store import ChunkStore, coded_header, coded_kv, coded_tensors
from kamera.trust import Certificate, Proof, ReusePolicy, Terms
from kamera.window.apart import stage_of
from kamera.window.certified import agree
from kamera.window.file import FILE, VERSION, Saved, Tensors, publish, read_saved, well_formed
from kamera.window.naming import NamedRequest
from kamera.window.report import Tally
from kamera.window.requests import Restore
from kamera.window.run import carried_out
from kamera.window.seats import PatchName, Seat, Source
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState


class WindowParts(NamedTuple):
    """What a window is made of."""

    terms: Terms
    stage: Stage
    state: WindowState


def save_window(path: Path, stage: Stage, state: WindowState, asked: ReusePolicy) -> str:
    """Write a window to the directory ``path``, as `publish` does; its digest.

    ``asked`` is the policy the window was opened with, not the part of it that a certificate permits.
    """
    former = stage.former
    tensors: Tensors = {"anchor/ids": former.anchor.input_ids}
    chunks = [_put_resident(tensors, f"{i:05d}", resident) for i, resident in enumerate(state.residents)]
    document = {
        "version": VERSION,
        "fingerprint": former.context.fingerprint,
        "tenant": former.context.tenant,
        "policy": asked.to_info(),
        "max_tokens": stage.max_tokens,
        "tail": former.anchor.tail,
        "reopen": former.anchor.reopen,
        "frame": list(state.frame),
        "chunks": chunks,
    }
    return publish(path, Saved(document, tensors))


def load_window(
    path: Path,
    backbone: Engine,
    store: ChunkStore,
    certificate: Certificate | str | os.PathLike[str] | None = None,
    digest: str | None = None,
) -> WindowParts:
    """Read a saved window; its anchor is read from the store, or prefilled again.

    ``digest`` as in `read_saved`. Each chunk is restored as it was, or made exact if its guarantee is no
    longer certified.
    """
    document, tensors = read_saved(path, digest)
    with well_formed(path / FILE):
        made_by, tenant = str(document["fingerprint"]), document["tenant"]
        policy = ReusePolicy(**document["policy"])
        max_tokens = document["max_tokens"]
        begun = (tensors["anchor/ids"], document["tail"], document["reopen"])
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
    anchor = anchor_of(backbone, *begun, store, losses, later=True)
    terms = agree(backbone, store, policy, certificate)
    served = terms.served
    stage = replace(stage_of(backbone, store, anchor, served, losses), max_tokens=max_tokens)
    former = stage.former
    with well_formed(path / FILE):
        residents = tuple(
            _get_resident(tensors, f"{i:05d}", chunk, stage) for i, chunk in enumerate(document["chunks"])
        )
        state = WindowState(residents, tuple(document["frame"]))
    if terms.withheld:
        with former.operation():
            state = carried_out(NamedRequest(Restore()), state, stage, served, Tally()).state
    return WindowParts(terms, stage, state)


def _put_resident(tensors: Tensors, name: str, resident: Resident) -> dict[str, Any]:
    encoded = resident.facts.encoded
    tensors[f"{name}/ids"] = encoded.input_ids
    tensors[f"{name}/positions"] = resident.positions
    tensors |= {f"{name}/inputs/{k}": v for k, v in encoded.position_inputs.items()}
    tensors |= {f"{name}/embeds/{k}": v for k, v in encoded.tensors.items()}
    copies = {"copy": (resident.copy, resident.seat.source)}
    if resident.clean is not None and resident.seat.clean is not None:
        copies["clean"] = (resident.clean, resident.seat.clean)
    return {
        "chunk_id": resident.facts.chunk_id,
        "label": resident.facts.label,
        "guarantee": resident.guarantee,
        "formed": resident.seat.formed,
        "archived": resident.seat.archived,
        "patch": None if resident.seat.source.name is None else asdict(resident.seat.source.name),
        "copies": {k: _put_copy(tensors, f"{name}/{k}", *c) for k, c in copies.items()},
    }


def _put_copy(tensors: Tensors, name: str, copy: Copy, source: Source) -> dict[str, Any]:
    tensors[f"{name}/positions"] = copy.positions
    coded = copy.kv if isinstance(copy.kv, CodedKV) else None
    for i, held in enumerate(() if coded is None else coded.codes.parts):
        for channel, codes in held.items():
            tensors |= {f"{name}/kv/{i}/{channel}/{part}": t for part, t in coded_tensors(codes)}
    for i, block in enumerate(copy.kv.parts if coded is None else ()):
        tensors |= {f"{name}/kv/{i}/{channel}": t for channel, t in block.items()}
    blocks = () if copy.patch is None else copy.patch.blocks.parts
    for i, factors in enumerate(blocks):
        for channel, low in factors.items():
            tensors |= {f"{name}/patch/{i}/{channel}/{factor}": t for factor, t in low.tensors().items()}
    return {
        "guarantee": source.guarantee,
        "antecedents": list(source.antecedents),
        "canonical": source.canonical,
        "lossy": copy.lossy,
        "coded": None if coded is None else coded_header(coded),
        "groups": [list(layers) for layers in copy.kv.groups],
        "ranks": None
        if copy.patch is None
        else [{n: list(low.ranks) for n, low in block.items()} for block in blocks],
        "info": {
            **({} if source.proof is None else source.proof.to_info()),
            **({} if source.sample is None else source.sample.to_info()),
        },
    }


def _get_resident(tensors: Tensors, name: str, chunk: dict[str, Any], stage: Stage) -> Resident:
    encoded = Encoded(
        tensors[f"{name}/ids"],
        _under(tensors, f"{name}/inputs/"),
        _under(tensors, f"{name}/embeds/"),
    )
    facts = Facts(chunk["chunk_id"], encoded, chunk["label"])
    pairs = {k: _get_copy(tensors, f"{name}/{k}", c, facts, stage) for k, c in chunk["copies"].items()}
    (copy, source), (clean, shown) = pairs["copy"], pairs.get("clean", (None, None))
    told = chunk["patch"]
    named = None if told is None else PatchName(**told | {"antecedents": tuple(told["antecedents"])})
    seat = Seat(
        facts.chunk_id,
        facts.length,
        stage.standing.spot(facts, tensors[f"{name}/positions"]),
        replace(source, name=named),
        chunk["guarantee"],
        chunk["formed"],
        # the store may be another than the one it was archived in
        chunk["archived"] and stage.former.catalogue.holds(facts.chunk_id),
        shown,
    )
    return Resident(facts, seat, copy, clean)


def _get_copy(
    tensors: Tensors, name: str, copy: dict[str, Any], facts: Facts, stage: Stage
) -> tuple[Copy, Source]:
    backbone = stage.former.backbone
    groups = check_groups(copy["groups"])
    channels = [[c.name for c in backbone.layout[layers[0]].channels] for layers in groups]
    positions = tensors[f"{name}/positions"]
    if copy["coded"] is None:
        kv: KV = Blocks(
            [{c: tensors[f"{name}/kv/{i}/{c}"] for c in names} for i, names in enumerate(channels)], groups
        )
    else:
        kv = coded_kv(copy["coded"], groups, channels, _under(tensors, f"{name}/"), positions.shape[1])
    patch = None
    if copy["ranks"] is not None:
        factors = [
            {
                c: LowRanks.from_tensors(_under(tensors, f"{name}/patch/{i}/{c}/"), block[c])
                for c in names
                if c in block  # the document's own order is that of their names
            }
            for i, (names, block) in enumerate(zip(channels, copy["ranks"], strict=True))
        ]
        patch = Patch(Blocks(factors, groups))
    source = Source(
        stage.standing.spot(facts, positions),
        tuple(copy["antecedents"]),
        copy["guarantee"],
        copy["canonical"],
        copy["lossy"],
        patch is not None,
        0 if patch is None else patch.nbytes,
        Proof.from_info(copy["info"]),
        SampleSize.from_info(copy["info"]),
    )
    return Copy(backbone.place(kv), positions, patch, copy["lossy"]), source


def _under(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
