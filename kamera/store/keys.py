"""Keys of objects, which bind everything an object's KV depends on.

All digests are BLAKE2b-256 in lower-case hex over length-prefixed fields. The first field names the
kind of content (the domain), so neither two field lists nor two kinds of object can share a key by
concatenation. `docs/stores.md` is the specification.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

from kamera.errors import AmbiguousId, UnknownChunk, quote
from kamera.ops import KVCodec, digest

PATCH_KINDS = ("exact", "orbit")
"""Kinds of patch: bound to the order of the antecedents, or only to their set."""

KV_KINDS = ("canonical", "anchor", "conditioned")
"""KV as the model computed it: of a chunk behind the anchor alone, of the anchor itself, or of a chunk in
some window, behind antecedents."""

KINDS = (*KV_KINDS, "encoding", *PATCH_KINDS)
"""Kinds of object; an encoding is the decoder's input for a chunk's pixels."""

KVForm = Literal["as-is", KVCodec]
KV_FORMS: tuple[KVForm, ...] = get_args(KVForm)
"""Forms in which canonicals are held: as the model computed them, or in codes (`ops.quantize`)."""

_KEY = re.compile(r"[0-9a-f]{64}")
_LINEAGE = "~"  # occurs in no chunk id


@dataclass(frozen=True)
class Context:
    """Everything a chunk's KV depends on apart from the chunk itself.

    ``fingerprint`` is the backbone's digest (weights, adapters, dtype, rotary and processor
    settings), ``anchor`` the digest of the anchor tokens, ``tenant`` the owner of the store, ``kv`` the form
    in which canonicals are held: like a dtype, it is part of a KV's identity, and a patch is formed against
    one form. ``origin`` says what made the KV, for people and for `why_missed`: facts by name as JSON, no
    part of any key nor of equality. Raises `ValueError` for a form that is not in `KV_FORMS`.
    """

    fingerprint: str
    anchor: str
    tenant: str = ""
    kv: str = "as-is"
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_form(self.kv)

    @property
    def lossy(self) -> bool:
        """True if canonicals here differ from the KV that the model computed."""
        return self.kv != "as-is"


def why_missed(own: Context, other: Context) -> str:
    """Why KV under ``other`` is none of ``own``, in a few words, by their origins; "" if it is."""
    reasons = []
    if other.fingerprint != own.fingerprint:
        mine, theirs = _facts(own), _facts(other)
        both = mine | theirs if mine and theirs else {}
        names = [name for name in both if mine.get(name) != theirs.get(name)]
        digests = [name for name in names if (mine.get(name) or theirs.get(name) or "").startswith("#")]
        reasons = [
            f"stored for {name} {theirs.get(name) or 'none'}, this backbone is {mine.get(name) or 'none'}"
            for name in names
            if name not in digests
        ]
        reasons = reasons or [f"stored for other {name}" for name in digests[:1]] or ["another model"]
    if other.anchor != own.anchor:
        reasons.append("another system prompt")
    if other.kv != own.kv:
        reasons.append(f"stored as {other.kv}, this store keeps {own.kv}")
    return "; ".join(reasons)


def _facts(context: Context) -> dict[str, str]:
    try:
        facts = json.loads(context.origin)
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def check_form(kv: str) -> None:
    """Raise `ValueError` unless ``kv`` is in `KV_FORMS`."""
    if kv not in KV_FORMS:
        raise ValueError(f"kv {quote(kv)} is none of {', '.join(KV_FORMS)}")


def check_kind(kind: str | None) -> None:
    """Raise `ValueError` for an unknown kind of object; None is any."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {quote(kind)} is none of {', '.join(KINDS)}")


def encoding_context(vision: str, tenant: str, origin: str = "") -> Context:
    """The context of encodings: ``vision`` is the fingerprint of tower, projector and processor alone."""
    return Context(vision, "", tenant, origin=origin)


@lru_cache(4096)  # a plan asks for each key several times
def canonical_key(context: Context, chunk_id: str) -> str:
    """Key of a chunk's canonical KV."""
    return digest(_domain("canonical", context), *_fields(context), chunk_id)


def patch_key(context: Context, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = "") -> str:
    """Key of the patch of a chunk behind ``antecedents`` (chunk ids, or names by `survivor_id`).

    ``kind`` is ``"exact"`` (their order matters) or ``"orbit"`` (it does not, but a chunk
    that occurs twice counts twice); any other raises `ValueError`. ``base``: the anchor of the canonical to
    which the patch is added, if it is not the context's own.
    """
    return _patch_key(context, chunk_id, tuple(antecedents), kind, base)


@lru_cache(4096)  # a plan asks for each key several times, and one may be of 64 ids
def _patch_key(context: Context, chunk_id: str, antecedents: tuple[str, ...], kind: str, base: str) -> str:
    if kind not in PATCH_KINDS:
        raise ValueError(f"a patch is of kind 'exact' or 'orbit', not {quote(kind)}")
    names = sorted(antecedents) if kind == "orbit" else antecedents
    based, anchor = (".based", [base]) if base else ("", [])
    return digest(_domain(f"patch.{kind}{based}", context), *_fields(context), *anchor, chunk_id, *names)


def object_key(
    kind: str, context: Context, chunk_id: str, antecedents: Sequence[str] = (), base: str = ""
) -> str:
    """Key of an object of any kind.

    That of conditioned KV follows from its content, whose digest is ``base``, or from `computed_base`. Raises
    `ValueError` for an unknown kind, an encoding whose context names an anchor, an anchor that is not its
    context's own, and any but a canonical or a patch under a context in codes.
    """
    if kind == "canonical":
        return canonical_key(context, chunk_id)
    if kind == "encoding" and not context.anchor and not context.lossy:
        return digest("kamera.encoding.v1", context.fingerprint, context.tenant, chunk_id)
    if kind == "anchor" and context.anchor == chunk_id and not context.lossy:
        return digest("kamera.anchor.v1", *_fields(context))
    if kind == "conditioned" and base and not context.lossy:
        return digest("kamera.conditioned.v1", *_fields(context), chunk_id, base, *antecedents)
    if kind in ("encoding", "anchor", "conditioned"):
        raise ValueError(f"no {kind} is of chunk {quote(chunk_id)} under {context}")
    return _patch_key(context, chunk_id, tuple(antecedents), kind, base)


@lru_cache(16)
def computed_base(guarantee: str) -> str:
    """In place of a digest of its content: the ``base`` of conditioned KV that an engine has computed.

    ``guarantee`` is that of its prefill. So the key follows from what it was computed behind, and who looks
    for it asks for one object.
    """
    return digest("kamera.computed.v1", guarantee)


def home_of(kind: str, context: Context, chunk_id: str, base: str) -> str:
    """Key of the object that this one cannot be used without: a patch's canonical, a canonical's encoding.

    ``base`` as in `ObjectInfo`; "" for an object that is of use by itself.
    """
    if kind in PATCH_KINDS:
        return canonical_key(replace(context, anchor=base or context.anchor), chunk_id)
    if kind in ("canonical", "conditioned") and base:
        return object_key("encoding", encoding_context(base, context.tenant), chunk_id)
    return ""


def survivor_id(chunk_id: str, lineage: str) -> str:
    """Name, in a patch's antecedents, of a chunk whose KV was not conditioned on its antecedents there.

    ``lineage`` is a digest of its actual conditioning. A chunk conditioned on its antecedents is named by
    its id.
    """
    return f"{chunk_id}{_LINEAGE}{lineage}"


def chunks_of(antecedents: Sequence[str]) -> tuple[str, ...]:
    """The chunk ids in a patch's antecedents."""
    if _LINEAGE not in "".join(antecedents):
        return tuple(antecedents)
    return tuple([antecedent.partition(_LINEAGE)[0] for antecedent in antecedents])


def behind_survivors(antecedents: Sequence[str]) -> bool:
    """True if a patch absorbed, through one of its antecedents, a chunk that it does not name."""
    return _LINEAGE in "".join(antecedents)


def is_key(text: str) -> bool:
    """True if ``text`` has the form of a key (and so is safe as a file name)."""
    return _KEY.fullmatch(text) is not None


def whole_id(start: str, ids: Iterable[str], what: str) -> str:
    """The one of ``ids`` that equals ``start``, or else the only one that begins with it.

    Raises `UnknownChunk` if there is none, `AmbiguousId` if there are several; ``what`` is the noun for
    the ids in the message.
    """
    matches = sorted({one for one in ids if one.startswith(start)}) if start else []
    if start in matches:
        return start
    if not matches:
        raise UnknownChunk(f"no {what} here begins with {quote(start)}: its ls lists what there is")
    if len(matches) > 1:
        examples = ", ".join(one[: len(start) + 6] for one in matches[:3])
        raise AmbiguousId(
            f"{quote(start)} names no one {what}: {len(matches)} begin so ({examples}, …); give more of it"
        )
    return matches[0]


def _domain(what: str, context: Context) -> str:
    # the form is in the domain, not in the fields: keys of as-is KV contain no form
    return f"kamera.{what}.{context.kv}.v1" if context.lossy else f"kamera.{what}.v1"


def _fields(context: Context) -> tuple[str, str, str]:
    return context.fingerprint, context.anchor, context.tenant
