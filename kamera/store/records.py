"""Records of a store: KV of chunks and of anchors, patches formed for chunks, encodings; and their rows.

A record turns into a JSON-able header plus flat, named tensors and back; the header alone determines
the names of the tensors. Tensors of a record that a store returned may be shared with other callers:
they must not be written in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from kamera.ops import (
    GRIDS,
    KV,
    KV_CODECS,
    Blocks,
    CodedChannel,
    CodedKV,
    Grid,
    Groups,
    Loss,
    LowRanks,
    Patch,
    PatchBudget,
    check_groups,
    code_kv,
    digest,
    ids_digest,
    name_order,
    tensor_digest,
    whole_lists,
)
from kamera.store.keys import KV_KINDS, PATCH_KINDS, Context, object_key
from kamera.store.search import unpack

Header = dict[str, Any]
"""JSON-able description of a record (`docs/stores.md` lists the fields)."""


def _common_header(
    kind: str, key: str, chunk_id: str, context: Context, tokens: int, info: Mapping[str, Any]
) -> Header:
    """The fields that every header has."""
    return {
        "kind": kind,
        "key": key,
        "chunk_id": chunk_id,
        "context": {
            "fingerprint": context.fingerprint,
            "anchor": context.anchor,
            "tenant": context.tenant,
            **({"kv": context.kv} if context.lossy else {}),
            **({"origin": context.origin} if context.origin else {}),
        },
        "tokens": tokens,
        "info": dict(info),
    }


def _check_identity(chunk_id: object, context: Context, info: object, **texts: object) -> None:
    """Raise `ValueError` unless ids, all fields of the context and ``texts`` are text, ``info`` a mapping."""
    for name, value in {"chunk_id": chunk_id, **vars(context), **texts}.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}")
    if not isinstance(info, Mapping):
        raise ValueError(f"info must be a mapping, got {type(info).__name__}")


def is_count(value: object) -> bool:
    """True if ``value`` is an int that a header may hold as a count."""
    return type(value) is int and 0 <= value < 2**53


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def canonical_json(value: object) -> str:
    """The one JSON text of ``value``: names sorted, no spaces, ASCII. Raises `ValueError` if it has none."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


OPENING = 16
"""Token ids of a chunk's beginning that its row repeats."""


@dataclass(frozen=True)
class Outline:
    """A chunk without its tensors.

    ``ids`` is the digest of its token ids (`kamera.ops.ids_digest`), ``opening`` the first `OPENING` of them.
    ``low`` and ``high`` are its lowest and highest position per axis where its KV was computed, ``advance``
    is how far behind its start a text begins that follows it (() if positions are no such sum). ``media``
    are ids by which an engine knows its pictures, in order: an alias, trusted within a tenant.
    """

    ids: str
    opening: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    advance: tuple[int, ...] = ()
    media: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        advance: Sequence[int] = (),
        media: Sequence[str] = (),
    ) -> Outline:
        """The outline of token ids ``[S]`` at ``positions`` ``[axes, S]``."""
        has_tokens = bool(input_ids.shape[0])
        ends = (positions.amin(1).tolist(), positions.amax(1).tolist()) if has_tokens else ((), ())
        opening = tuple(input_ids[:OPENING].tolist())
        whole = ids_digest(input_ids.numpy())
        return cls(whole, opening, tuple(ends[0]), tuple(ends[1]), tuple(advance), tuple(media))

    def check(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Raise ValueError unless it is of these tensors; of tensors without content nothing is compared."""
        if not input_ids.is_meta and self != self.of(input_ids, positions, self.advance, self.media):
            raise ValueError(f"outline {self.ids[:12]} is not that of the token ids and positions")

    def to_header(self) -> dict[str, Any]:
        """The outline as JSON-able."""
        return {name: value if name == "ids" else list(value) for name, value in vars(self).items()}

    @classmethod
    def from_header(cls, said: Mapping[str, Any]) -> Outline:
        """The inverse of `to_header`. Raises ValueError, KeyError or TypeError for what it did not write."""
        if said.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"an outline of {sorted(said)}")
        if not isinstance(said["ids"], str) or not all(isinstance(m, str) for m in said["media"]):
            raise ValueError("an outline's ids and media must be text")
        numbers = [n for name in ("opening", "low", "high", "advance") for n in said[name]]
        if not all(type(number) is int for number in numbers):
            raise ValueError("an outline's places must be whole numbers")
        lists = {name: tuple(value) for name, value in said.items() if name != "ids"}
        return cls(said["ids"], **lists)


@dataclass(frozen=True, eq=False)
class CanonicalRecord:
    """A chunk's KV behind the anchor alone, at the positions it was computed for; or the anchor's own.

    ``input_ids`` ``[S]`` int64 · ``positions`` ``[axes, S]`` int64 · ``kv`` by block and channel
    ``[layers, heads, S, dim]``, a `CodedKV` once it is held in codes · ``inputs``: small model inputs a
    window needs again (grids, token types) · ``vision``: the fingerprint under which its encoding is stored,
    "" for a chunk without one · ``behind``: tokens of the anchor it was computed behind · ``embedding``: how
    its pictures look (`picture_embedding`), "" without any · ``info``: JSON. For
    ``kind`` "anchor" the chunk is the anchor; of the kind "conditioned" it was run behind ``antecedents`` in
    some window, and ``content`` is the digest by which it is named (or `computed_base`). Neither is ever in
    codes. ``outline`` is what its row says of it; one without advance and media is made if none is given.
    Raises `ValueError` when the shapes disagree, or codes are not of the context's form.
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
        _check_identity(self.chunk_id, self.context, self.info, **texts)
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
        return _bytes_of(self.tensors())

    def header(self) -> Header:
        """Everything but the tensors. Raises `ValueError` for a KV that `to_store_form` has not coded."""
        if self.context.lossy and not isinstance(self.kv, CodedKV):
            raise ValueError(f"KV as it is under a context of kv={self.context.kv!r}: it is not coded yet")
        header = {
            **_common_header(self.kind, self.key, self.chunk_id, self.context, self.tokens, self.info),
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
        return header | ({"coded": _codes_header(self.kv)} if isinstance(self.kv, CodedKV) else {})

    def tensors(self) -> dict[str, torch.Tensor]:
        """``input_ids``, ``positions``, ``kv/0/k``, ``inputs/…``; not copied.

        A channel in codes is ``kv/0/k/codes``, ``…/steps`` and ``…/lows`` instead; the number is the block's.
        """
        flat = {"input_ids": self.input_ids, "positions": self.positions}
        for i, block in enumerate(_channels(self.kv)):
            for channel, values in block.items():
                name = f"kv/{i}/{channel}"
                if isinstance(values, CodedChannel):
                    flat.update({f"{name}/{part}": getattr(values, part) for part in _PARTS})
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
        _check_identity(self.chunk_id, self.context, self.info, base=self.base)
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
        return _bytes_of(self.tensors())

    def header(self) -> Header:
        """Everything but the tensors."""
        header = {
            **_common_header(self.kind, self.key, self.chunk_id, self.context, self.tokens, self.info),
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


@dataclass(frozen=True, eq=False)
class EncodingRecord:
    """The decoder's input for a chunk's pixels, which does not depend on the antecedents.

    ``context`` is a `encoding_context`: the fingerprint of the vision part alone, no anchor. ``tokens``:
    of the chunk; ``embeds``: the decoder's arguments by name, entry 2 of a list as ``name.2``. Raises
    `ValueError` for invalid fields and a list with a gap.
    """

    kind: ClassVar[str] = "encoding"

    chunk_id: str
    context: Context
    tokens: int
    embeds: Mapping[str, torch.Tensor]
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_identity(self.chunk_id, self.context, self.info)
        if not is_count(self.tokens):
            raise ValueError(f"tokens must be a count, got {self.tokens!r}")
        whole_lists(self.embeds)

    @property
    def key(self) -> str:
        """The key of this record. Raises `ValueError` for a context that has an anchor or codes."""
        return object_key("encoding", self.context, self.chunk_id)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _bytes_of(self.tensors())

    def header(self) -> Header:
        """Everything but the tensors."""
        header = _common_header(self.kind, self.key, self.chunk_id, self.context, self.tokens, self.info)
        return header | {"embeds": name_order(self.embeds)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """``embeds/…``; not copied."""
        return {f"embeds/{name}": tensor for name, tensor in self.embeds.items()}

    @classmethod
    def from_parts(cls, header: Header, tensors: Mapping[str, torch.Tensor]) -> EncodingRecord:
        """The record of `header` and `tensors`; `KeyError` names a tensor that is missing."""
        embeds = {name: tensors[f"embeds/{name}"] for name in header["embeds"]}
        context = Context(**header["context"])
        return cls(header["chunk_id"], context, header["tokens"], embeds, header["info"])


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
        return _codes_kv(header["coded"], groups, header["channels"], tensors, tokens)
    blocks = enumerate(header["channels"])
    return Blocks([{name: tensors[f"kv/{i}/{name}"] for name in names} for i, names in blocks], groups)


def _channels(kv: KV) -> Sequence[Mapping[str, torch.Tensor | CodedChannel]]:
    """The channels as stored, none decoded."""
    return kv.codes.parts if isinstance(kv, CodedKV) else kv.parts


def conditioned_record(record: CanonicalRecord, antecedents: Sequence[str]) -> CanonicalRecord:
    """The record of KV that was run behind ``antecedents``, named by its content; reads all of it."""
    block_digests = [tensor_digest(dict(block)) for block in record.kv.parts]
    places = (tensor_digest(record.input_ids), tensor_digest(record.positions))
    content = digest("kamera.content.v1", *places, *block_digests)
    context, chunk_ids = replace(record.context, kv="as-is"), tuple(antecedents)
    return replace(record, kind="conditioned", context=context, antecedents=chunk_ids, content=content)


_PARTS = ("codes", "steps", "lows")


def _codes_header(kv: CodedKV) -> dict[str, Any]:
    """Everything but the tensors, JSON-able: ``bits``, ``group``, ``axes`` by channel, ``loss``."""
    return {
        "bits": kv.grid.bits,
        "group": kv.grid.group,
        "axes": {name: channel.axis for block in kv.codes.parts for name, channel in block.items()},
        "loss": asdict(kv.loss),
    }


def _codes_kv(
    header: Mapping[str, Any],
    groups: Groups,
    channels: Sequence[Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    tokens: int,
) -> CodedKV:
    """The KV of a `_codes_header`, of blocks of ``groups`` and ``channels``, and of ``tensors``.

    Raises KeyError for a missing field or tensor, ValueError or TypeError for one that does not fit.
    """
    grid = Grid(header["bits"], header["group"])

    def channel(i: int, name: str) -> CodedChannel:
        codes, steps, lows = (tensors[f"kv/{i}/{name}/{part}"] for part in _PARTS)
        return CodedChannel(codes, steps, lows, tokens, header["axes"][name], grid)

    parts = [{name: channel(i, name) for name in names} for i, names in enumerate(channels)]
    return CodedKV(Blocks(parts, groups), grid, Loss(**header["loss"]))


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its key, its chunk and context, and its size.

    ``antecedents`` is empty, ``rank`` and ``formed`` are None for an object that is no patch. ``bytes`` is
    the size as stored, ``created`` seconds since 1970 (UTC). ``budget`` is the one a patch was formed under
    (None if its header holds no valid one), ``orderings`` the number of orderings averaged in an orbit patch,
    ``error`` the share of the deficit's energy that a patch leaves out, in its worst layer and channel (None:
    not said).
    ``base`` identifies the object that this one cannot be used without: for a canonical the vision
    fingerprint of its encoding ("": it has none), for a patch the anchor of the canonical to which it is
    added ("": its context's own). ``behind``: tokens of the anchor that a canonical was computed behind.
    ``outline`` describes the chunk of a canonical, an anchor or conditioned KV.
    """

    key: str
    kind: str
    chunk_id: str
    context: Context
    antecedents: tuple[str, ...]
    tokens: int
    rank: int | None
    formed: str | None
    bytes: int
    created: float
    budget: PatchBudget | None = None
    orderings: int | None = None
    base: str = ""
    behind: int = 0
    error: float | None = None
    outline: Outline | None = None

    @classmethod
    def of(cls, header: Header, size: int, name: str) -> ObjectInfo:
        """The row of the object ``name`` of ``size`` bytes with this header."""
        is_patch, info = header["kind"] in PATCH_KINDS, header["info"]
        error: Any = info.get("error") if is_patch else None
        orderings = info.get("orderings") if header["kind"] == "orbit" else None
        return cls(
            key=name,
            kind=header["kind"],
            chunk_id=header["chunk_id"],
            context=Context(**header["context"]),
            antecedents=tuple(header.get("antecedents", ())),
            tokens=header["tokens"],
            rank=header.get("rank"),
            formed=header.get("formed"),
            bytes=size,
            created=header["created"],
            budget=_budget_of(header) if is_patch else None,
            orderings=orderings if is_count(orderings) else None,
            base=header.get("vision") or header.get("base") or "",
            behind=header.get("behind", 0),
            error=float(error) if type(error) in (int, float) and 0.0 <= error <= 1.0 else None,
            outline=Outline.from_header(header["outline"]) if "outline" in header else None,
        )


class Held(NamedTuple):
    """A verified record, its row, the stamp of its file ("" without one), and its bytes if asked for."""

    record: Record
    info: ObjectInfo
    stamp: str = ""
    data: bytes = b""


def _budget_of(header: Header) -> PatchBudget | None:
    """The budget of a patch; None if ``info``, which is free text to the format, holds none."""
    try:
        return PatchBudget.from_info(header["info"], header["rank"])
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
