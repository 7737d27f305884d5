"""Records of a store: KV of chunks and of anchors, patches formed for chunks, and their encodings.

A record turns into a JSON-able header plus flat, named tensors and back; the header alone determines
the names of the tensors. Tensors of a record that a store returned may be shared with other callers:
they must not be written in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kamera.ops import (
    GRIDS,
    KV,
    KV_CODECS,
    Blocks,
    CodedChannel,
    CodedKV,
    Groups,
    Loss,
    LowRanks,
    Patch,
    check_groups,
    code_kv,
)
from kamera.store.coded import codes_header, codes_kv, codes_tensors
from kamera.store.encoding import EncodingRecord
from kamera.store.fields import (
    Header,
    bytes_of,
    canonical_json,
    check_identity,
    common_header,
    is_count,
)
from kamera.store.keys import KV_KINDS, PATCH_KINDS, Context, object_key
from kamera.store.outline import Outline
from kamera.store.search import unpack


@dataclass(frozen=True, eq=False)
class CanonicalRecord:
    """A chunk's KV behind the anchor alone, at the positions it was computed for; or the anchor's own.

    ``input_ids`` ``[S]`` int64 · ``positions`` ``[axes, S]`` int64 · ``kv`` by block and channel
    ``[layers, heads, S, dim]``, a `CodedKV` once it is held in codes · ``inputs``: small model inputs a
    window needs again (grids, token types) · ``vision``: the fingerprint under which its encoding is stored,
    "" for a chunk without one · ``behind``: tokens of the anchor it was computed behind · ``embedding``: how
    its pictures look (`search.picture_embedding`), "" without any · ``info``: JSON. For
    ``kind`` "anchor" the chunk is the anchor; of the kind "conditioned" it was run behind ``antecedents`` in
    some window, and ``content`` is the digest by which it is named. Neither is ever in codes. ``outline``
    is what its row says of it; one without advance and media is made if none is given. Raises
    `ValueError` when the shapes disagree, or codes are not of the context's form.
    """

    chunk_id: str
    context: Context
    input_ids: torch.Tensor
    positions: torch.Tensor
    kv: KV
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    vision: str = ""
    behind: int = 0
    kind: str = "canonical"
    embedding: str = ""
    antecedents: tuple[str, ...] = ()
    content: str = ""
    outline: Outline | None = None

    def __post_init__(self) -> None:
        texts = {"vision": self.vision, "embedding": self.embedding, "content": self.content}
        check_identity(self.chunk_id, self.context, self.info, **texts)
        if self.embedding:
            unpack(self.embedding)  # raises an error for what is none
        if self.kind not in KV_KINDS or not is_count(self.behind):
            raise ValueError(f"KV of kind {self.kind!r} behind {self.behind!r} tokens")
        for name, dims in (("input_ids", 1), ("positions", 2)):
            tensor = getattr(self, name)
            if tensor.dim() != dims or tensor.dtype != torch.int64:
                raise ValueError(
                    f"{name} must be int64 with {dims} dimension(s), got {tensor.dtype} {tuple(tensor.shape)}"
                )
        if self.positions.shape[1] != self.tokens:
            raise ValueError(f"positions for {self.positions.shape[1]} of {self.tokens} tokens")
        if self.outline is not None:
            self.outline.check(self.input_ids, self.positions)
        for block, layers in zip(_channels(self.kv), self.kv.groups, strict=True):
            for channel, tensor in block.items():
                shape = tuple(tensor.shape)
                if len(shape) != 4 or (shape[0], shape[2]) != (len(layers), self.tokens):
                    raise ValueError(
                        f"layer {layers[0]} channel {channel!r} must be "
                        f"[{len(layers)}, heads, {self.tokens}, dim], got {shape}"
                    )
        if isinstance(self.kv, CodedKV) and self.kv.grid != GRIDS.get(self.context.kv):
            raise ValueError(f"KV in {self.kv.grid.bits}-bit codes under a context of kv={self.context.kv!r}")

    @property
    def loss(self) -> Loss | None:
        """The loss of this KV by its codes; None if it is as the model computed it."""
        return self.kv.loss if isinstance(self.kv, CodedKV) else None

    @property
    def key(self) -> str:
        """The key of this record. Raises `ValueError` for an anchor that is not its context's own."""
        return object_key(self.kind, self.context, self.chunk_id, self.antecedents, self.content)

    @property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return self.input_ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return bytes_of(self.tensors())

    def header(self) -> Header:
        """Everything but the tensors. Raises `ValueError` for a KV that `to_store_form` has not coded."""
        if self.context.lossy and not isinstance(self.kv, CodedKV):
            raise ValueError(f"KV as it is under a context of kv={self.context.kv!r}: it is not coded yet")
        header = {
            **common_header(self.kind, self.key, self.chunk_id, self.context, self.tokens, self.info),
            "groups": [list(layers) for layers in self.kv.groups],
            "channels": [list(block) for block in self.kv.parts],
            "inputs": sorted(self.inputs),
            "vision": self.vision,
            "behind": self.behind,
            "embedding": self.embedding,
            "outline": (self.outline or Outline.of(self.input_ids, self.positions)).to_header(),
        }
        if self.kind == "conditioned":
            header |= {"antecedents": list(self.antecedents), "base": self.content}
        return header | ({"coded": codes_header(self.kv)} if isinstance(self.kv, CodedKV) else {})

    def tensors(self) -> dict[str, torch.Tensor]:
        """``input_ids``, ``positions``, ``kv/0/k``, ``inputs/…``; not copied.

        A channel in codes is ``kv/0/k/codes``, ``…/steps`` and ``…/lows`` instead; the number is the block's.
        """
        flat = {"input_ids": self.input_ids, "positions": self.positions}
        for i, block in enumerate(_channels(self.kv)):
            for channel, values in block.items():
                name = f"kv/{i}/{channel}"
                if isinstance(values, CodedChannel):
                    flat.update({f"{name}/{part}": t for part, t in codes_tensors(values)})
                else:
                    flat[name] = values
        flat.update({f"inputs/{name}": t for name, t in self.inputs.items()})
        return flat

    @classmethod
    def from_parts(cls, header: Header, tensors: Mapping[str, torch.Tensor]) -> CanonicalRecord:
        """The record of `header` and `tensors`; `KeyError` names a tensor that is missing."""
        context = Context(**header["context"])
        return cls(
            chunk_id=header["chunk_id"],
            context=context,
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            kv=_kv(header, tensors, tensors["input_ids"].shape[0]),
            inputs={name: tensors[f"inputs/{name}"] for name in header["inputs"]},
            info=header["info"],
            vision=header["vision"],
            behind=header["behind"],
            kind=header["kind"],
            embedding=header["embedding"],
            antecedents=tuple(header.get("antecedents", ())),
            content=header.get("base", ""),
            outline=Outline.from_header(header["outline"]),
        )


@dataclass(frozen=True, eq=False)
class PatchRecord:
    """A patch of a chunk behind antecedents, in the canonical frame.

    ``antecedents`` are chunk ids in window order; ``kind`` is ``"exact"`` (this order) or
    ``"orbit"`` (this set). ``formed`` is the weakest guarantee the antecedents themselves carried
    when it was formed. ``base``: the anchor of the canonical to which it is added, "" for the context's
    own. Raises `ValueError` when the factors' token counts disagree.
    """

    chunk_id: str
    context: Context
    antecedents: tuple[str, ...]
    kind: str
    patch: Patch
    formed: str
    info: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    def __post_init__(self) -> None:
        check_identity(self.chunk_id, self.context, self.info, base=self.base)
        if self.kind not in PATCH_KINDS:
            raise ValueError(f"kind must be one of {', '.join(PATCH_KINDS)}, got {self.kind!r}")
        if not isinstance(self.formed, str):
            raise ValueError(f"formed must be a guarantee's name, got {self.formed!r}")
        if not all(isinstance(chunk, str) for chunk in self.antecedents):
            raise ValueError(f"antecedents must be chunk ids, got {self.antecedents!r}")
        for i, channel, factors in self._factors():
            layers = self.patch.groups[i]
            if factors.left.shape[0] != self.tokens or len(factors.ranks) != len(layers):
                raise ValueError(
                    f"layers {list(layers)} channel {channel!r}: factors of {len(factors.ranks)} layers "
                    f"correct {factors.left.shape[0]} tokens, others {self.tokens}"
                )

    @property
    def key(self) -> str:
        """The key of this record."""
        return object_key(self.kind, self.context, self.chunk_id, self.antecedents, self.base)

    @property
    def tokens(self) -> int:
        """Number of tokens it corrects (0 when it corrects nothing)."""
        return self.patch.num_tokens or 0

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return bytes_of(self.tensors())

    def header(self) -> Header:
        """Everything but the tensors."""
        header = {
            **common_header(self.kind, self.key, self.chunk_id, self.context, self.tokens, self.info),
            "antecedents": list(self.antecedents),
            "base": self.base,
            "formed": self.formed,
            "rank": self.patch.rank,
            "groups": [list(layers) for layers in self.patch.groups],
            "ranks": [{n: list(f.ranks) for n, f in block.items()} for block in self.patch.blocks.parts],
        }
        if self._has_codes:
            names = [{n: sorted(f.tensors()) for n, f in block.items()} for block in self.patch.blocks.parts]
            header["factors"] = names
        return header

    def tensors(self) -> dict[str, torch.Tensor]:
        """``patch/0/v/left`` and ``…/right`` by block and channel corrected; not copied.

        A factor in codes is ``…/left_codes`` and ``…/left_scales`` instead.
        """
        return {
            f"patch/{i}/{channel}/{name}": tensor
            for i, channel, factors in self._factors()
            for name, tensor in factors.tensors().items()
        }

    @classmethod
    def from_parts(cls, header: Header, tensors: Mapping[str, torch.Tensor]) -> PatchRecord:
        """The record of `header` and `tensors`; `KeyError` names a tensor that is missing."""

        def factors(i: int, channel: str, ranks: Sequence[int]) -> LowRanks:
            names = header["factors"][i][channel] if "factors" in header else ("left", "right")
            return LowRanks.from_tensors({n: tensors[f"patch/{i}/{channel}/{n}"] for n in names}, ranks)

        parts = [
            {channel: factors(i, channel, ranks) for channel, ranks in block.items()}
            for i, block in enumerate(header["ranks"])
        ]

        return cls(
            chunk_id=header["chunk_id"],
            context=Context(**header["context"]),
            antecedents=tuple(header["antecedents"]),
            kind=header["kind"],
            patch=Patch(Blocks(parts, check_groups(header["groups"]))),
            formed=header["formed"],
            info=header["info"],
            base=header["base"],
        )

    @property
    def _has_codes(self) -> bool:
        return any(set(f.tensors()) - {"left", "right"} for _, _, f in self._factors())

    def _factors(self) -> Iterator[tuple[int, str, LowRanks]]:
        for i, block in enumerate(self.patch.blocks.parts):
            for channel, factors in block.items():
                yield i, channel, factors


Record = CanonicalRecord | PatchRecord | EncodingRecord
"""The object stored under one key."""


def record_of(header: Header, tensors: Mapping[str, torch.Tensor]) -> Record:
    """The record of a header and its tensors; `KeyError` names a tensor that is missing."""
    cls: Any = CanonicalRecord if header["kind"] in KV_KINDS else PatchRecord
    cls = EncodingRecord if header["kind"] == "encoding" else cls
    record: Record = cls.from_parts(header, tensors)
    return record


def base_of(record: Record) -> str:
    """`ObjectInfo.base` of a record: a canonical's vision, or the anchor of a patch's canonical."""
    if isinstance(record, EncodingRecord):
        return ""
    return record.vision if isinstance(record, CanonicalRecord) else record.base


def to_store_form(record: CanonicalRecord) -> CanonicalRecord:
    """The form in which a store keeps ``record``. Raises `ValueError` for a KV that has no codes."""
    codec = next((c for c in KV_CODECS if c == record.context.kv), None)
    if codec is None or isinstance(record.kv, CodedKV):
        return record
    return replace(record, kv=code_kv(record.kv, codec))


def detach(record: Record) -> Record:
    """The copy that a store keeps of ``record``: `to_store_form`, contiguous, on the CPU, of its own."""
    if isinstance(record, CanonicalRecord):
        record = to_store_form(record)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

    header = json.loads(canonical_json(record.header()))
    return record_of(header, {n: own(t) for n, t in record.tensors().items()})


def _kv(header: Header, tensors: Mapping[str, torch.Tensor], tokens: int) -> KV:
    groups: Groups = check_groups(header["groups"])
    if Context(**header["context"]).lossy:
        return codes_kv(header["coded"], groups, header["channels"], tensors, tokens)
    blocks = enumerate(header["channels"])
    return Blocks([{name: tensors[f"kv/{i}/{name}"] for name in names} for i, names in blocks], groups)


def _channels(kv: KV) -> Sequence[Mapping[str, torch.Tensor | CodedChannel]]:
    """The channels as stored, none decoded."""
    return kv.codes.parts if isinstance(kv, CodedKV) else kv.parts
