"""What an object is called: keys that bind everything its KV depends on.

All digests are BLAKE2b-256 in lower-case hex over length-prefixed fields whose first field names
what is digested (the domain), so neither two field lists nor two kinds of object can meet in one
key by concatenation. `docs/store-format.md` is the specification.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kamera.errors import AmbiguousId, UnknownChunk
from kamera.ops import KVCodec, digest

PATCH_KINDS = ("exact", "orbit")
"""A patch binds the order of the antecedents, or only their set."""

KV_KINDS = ("canonical", "anchor")
"""KV as the model computed it: of a chunk behind the anchor alone, or of the anchor itself."""

KINDS = (*KV_KINDS, "encoding", *PATCH_KINDS)
"""Kinds of object; an encoding is what the decoder receives for a chunk's pixels."""

KVForm = Literal["as-is", KVCodec]
KV_FORMS: tuple[KVForm, ...] = get_args(KVForm)
"""How canonicals are held: as the model computed them, or in codes (`ops.quantize_kv`)."""

_KEY = re.compile(r"[0-9a-f]{64}")
_LINEAGE = "~"  # in no chunk id


@dataclass(frozen=True)
class Context:
    """Everything a chunk's KV depends on apart from the chunk itself.

    ``fingerprint`` is the backbone's digest (weights, adapters, dtype, rotary and processor
    settings), ``anchor`` the digest of the anchor tokens, ``tenant`` whose store it is, ``kv`` the form
    canonicals are held in: as a dtype, it is part of what a KV is, and patches are formed against one of
    them. Raises `ValueError` for a form that is none of `KV_FORMS`.
    """

    fingerprint: str
    anchor: str
    tenant: str = ""
    kv: str = "as-is"

    def __post_init__(self) -> None:
        check_form(self.kv)

    @property
    def lossy(self) -> bool:
        """Whether canonicals here are not quite what the model computed."""
        return self.kv != "as-is"


def check_form(kv: str) -> None:
    """Raise `ValueError` unless ``kv`` is one of `KV_FORMS`."""
    if kv not in KV_FORMS:
        raise ValueError(f"kv {kv!r} is none of {', '.join(KV_FORMS)}")


def encoding_context(vision: str, tenant: str) -> Context:
    """The context of encodings: ``vision`` is the fingerprint of tower, projector and processor alone."""
    return Context(vision, "", tenant)


def canonical_key(context: Context, chunk_id: str) -> str:
    """Key of a chunk's canonical KV."""
    return digest(_domain("canonical", context), *_fields(context), chunk_id)


def patch_key(context: Context, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = "") -> str:
    """Key of the patch of a chunk behind ``antecedents`` (chunk ids; `survivor` where one remembers others).

    ``kind`` is ``"exact"``, where their order matters, or ``"orbit"``, where it does not (a chunk
    that stands there twice still counts twice). ``base``: the anchor of the canonical that it is added to,
    where that is not the context's own. Raises `ValueError` for any other kind.
    """
    if kind not in PATCH_KINDS:
        raise ValueError(f"a patch is of kind 'exact' or 'orbit', not {kind!r}")
    ordered = sorted(antecedents) if kind == "orbit" else antecedents
    if base:
        domain = _domain(f"patch.{kind}.based", context)
        return digest(domain, *_fields(context), base, chunk_id, *ordered)
    return digest(_domain(f"patch.{kind}", context), *_fields(context), chunk_id, *ordered)


def object_key(
    kind: str, context: Context, chunk_id: str, antecedents: Sequence[str] = (), base: str = ""
) -> str:
    """Key of an object of any kind. Raises `ValueError` for what is none.

    That is an encoding whose context names an anchor, or an anchor that is not its context's own; neither
    is in codes.
    """
    if kind == "canonical":
        return canonical_key(context, chunk_id)
    if kind == "encoding" and not context.anchor and not context.lossy:
        return digest("kamera.encoding.v1", context.fingerprint, context.tenant, chunk_id)
    if kind == "anchor" and context.anchor == chunk_id and not context.lossy:
        return digest("kamera.anchor.v1", *_fields(context))
    if kind in ("encoding", "anchor"):
        raise ValueError(f"no {kind} is of chunk {chunk_id!r} under {context}")
    return patch_key(context, chunk_id, antecedents, kind, base)


def survivor(chunk_id: str, lineage: str) -> str:
    """What a patch's antecedents call a chunk whose KV knew something else than what stands before it there.

    ``lineage`` is a digest of what it knew. A chunk conditioned on what stands before it goes by its id.
    """
    return f"{chunk_id}{_LINEAGE}{lineage}"


def chunk_of(antecedent: str) -> str:
    """The chunk id in an entry of a patch's antecedents."""
    return antecedent.partition(_LINEAGE)[0]


def behind_survivors(antecedents: Sequence[str]) -> bool:
    """Whether a patch absorbed, through one of its antecedents, something that it does not name."""
    return any(_LINEAGE in antecedent for antecedent in antecedents)


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a key (and so is safe as a file name)."""
    return _KEY.fullmatch(text) is not None


def whole_id(start: str, ids: Iterable[str], what: str) -> str:
    """The one of ``ids`` that is ``start``, or that alone begins with it.

    Raises `UnknownChunk` and `AmbiguousId`, which say of ``what`` it is none.
    """
    found = sorted({one for one in ids if one.startswith(start)}) if start else []
    if start in found:
        return start
    if not found:
        raise UnknownChunk(f"no {what} here begins with {start!r}: kamera store ls shows what there is")
    if len(found) > 1:
        shown = ", ".join(one[: len(start) + 6] for one in found[:3])
        raise AmbiguousId(
            f"{start!r} names no one {what}: {len(found)} begin so ({shown}, …); give more of it"
        )
    return found[0]


def _domain(what: str, context: Context) -> str:
    # the form stands here and not among the fields: a key of KV as it is says nothing of forms
    return f"kamera.{what}.{context.kv}.v1" if context.lossy else f"kamera.{what}.v1"


def _fields(context: Context) -> tuple[str, str, str]:
    return context.fingerprint, context.anchor, context.tenant
