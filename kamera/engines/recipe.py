"""A recipe: a window written down for an engine that schedules by itself.

It names stored objects and holds no tensor. JSON both ways, strict: a text that was edited, values of other
types and parts that contradict each other are refused by name. A scheduler reads it before anything else, so
it says nothing twice: each name stands once, in ``names``. Antecedents are how many of those told before they
begin with, and the numbers of the others. Keys follow from the other fields; token ids are int32 in base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from types import NoneType
from typing import Any

import numpy as np

from kamera.errors import IncompatibleChunk, InvalidRecipe, quote
from kamera.ops import digest, ids_digest
from kamera.store import Context, computed_base, object_key, survivor_id
from kamera.trust import GUARANTEES, Guarantee

Offset = tuple[int, ...]
"""Whole positions, one number per axis."""

_PATCHES = ("exact", "orbit")
_BASES = ("canonical", "conditioned")
_MOST = 1 << 22
"""Antecedents that all rows of a recipe name together: a short text can repeat a long list in each row."""
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True)
class RowKey:
    """An object of the store by its name, from which its ``key`` follows (`kamera.store.object_key`).

    ``base``: of a patch as in `PatchRecord`, of conditioned KV the digest of its content. A patch was
    ``formed`` behind that guarantee and ``created`` then (seconds since 1970): one that was formed again is
    another. At most ``rank`` columns of it are applied (None: all).
    """

    kind: str
    chunk_id: str
    context: Context
    antecedents: tuple[str, ...] = ()
    base: str = ""
    formed: str | None = None
    created: float | None = None
    rank: int | None = None

    @classmethod
    def of(cls, own: Context, kind: str, chunk_id: str, *rest: Any, anchor: str = "") -> RowKey:
        """The name of an object in a recipe of the context ``own``.

        ``anchor`` is that of the canonical that a patch of another ``base`` is added to, "" the recipe's own.
        """
        return cls(kind, chunk_id, _context(own, kind, anchor or own.anchor), *rest)

    @cached_property
    def key(self) -> str:
        """The name that the store uses. Raises ValueError if the fields name no object."""
        return object_key(self.kind, self.context, self.chunk_id, self.antecedents, self.base)


def _context(own: Context, kind: str, anchor: str) -> Context:
    """The context of an object of this kind behind ``anchor``, in a recipe of the context ``own``."""
    kv = "as-is" if kind in ("anchor", "conditioned") else own.kv
    return own if (anchor, kv) == (own.anchor, own.kv) else replace(own, anchor=anchor, kv=kv)


@dataclass(frozen=True)
class Part:
    """A slot: tokens ``ids`` of the rendered prompt, placeholders expanded, from ``start`` on.

    ``position`` is its lowest position on each axis as the model counts this sequence, ``offset`` how far its
    stored KV is turned to get there. ``guarantee`` is what it is worth here. It is conditioned on exactly its
    ``antecedents`` (`kamera.store.survivor_id` names survivors). ``kv`` is its canonical, KV(B|∅),
    to which a ``patch`` is added before it turns, or KV that was run behind its antecedents ("conditioned").
    ``missing``: why this part cannot be shown elsewhere; "" if it can, and only then it has a ``kv``.
    """

    chunk_id: str
    ids: tuple[int, ...]
    start: int
    position: Offset
    offset: Offset
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    kv: RowKey | None = None
    patch: RowKey | None = None
    missing: str = ""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def stop(self) -> int:
        """Index of the first token behind it."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Recipe:
    """A window for another engine: token ids, borders, places, rows, guarantees.

    ``context`` is the store's; an engine that was started on the model's files computes its fingerprint by
    `kamera.engines.checkpoint_fingerprint`. The anchor stands unturned in front; None if it is not stored.
    Raises InvalidRecipe for parts that contradict each other.
    """

    context: Context
    anchor: RowKey | None
    anchor_ids: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        wrong = _contradiction(self)
        if wrong:
            raise InvalidRecipe(f"no recipe: {wrong}; take one from window.recipe()")

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole sequence."""
        return tuple(chain(self.anchor_ids, *(part.ids for part in self.parts)))

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """Each part as an antecedent of those behind it; one that is missing is computed where it stands."""
        names: tuple[str, ...] = ()
        for part in self.parts:
            own = names if part.missing else part.antecedents
            names = (*names, antecedent_name(part.chunk_id, own, names))
        return names

    @property
    def borders(self) -> tuple[int, ...]:
        """Start of each part, and the end of the last one."""
        lengths = (part.length for part in self.parts)
        return tuple(accumulate(lengths, initial=len(self.anchor_ids)))

    @property
    def missing(self) -> tuple[str, ...]:
        """Why parts cannot be shown elsewhere, a line each; empty for a recipe that any executor can show."""
        lines = ["the system prompt is not stored yet: window.flush()"] if self.anchor is None else []
        gaps = [(i, part) for i, part in enumerate(self.parts) if part.missing]
        return (*lines, *[f"slot {i} (chunk {part.chunk_id[:12]}): {part.missing}" for i, part in gaps])

    @property
    def leading(self) -> Recipe:
        """The parts in front of the first that is missing."""
        count = next((i for i, part in enumerate(self.parts) if part.missing), None)
        return self if count is None else replace(self, parts=self.parts[:count])

    @cached_property
    def salt(self) -> str:
        """What a prefix cache, which compares tokens alone, has to keep a prompt apart by.

        The tenant, "" for none, if what the leading parts supply equals a prefill. Else a digest of what they
        are made of, up to the last one that a prefill behind those before it would not make. All behind that
        is computed, or was: so a longer window shares the pages of a shorter one.
        """
        own, parts, names = self.context, self.leading.parts, self.part_names
        last, wanted = -1, "exact"  # the last part that differs; what a prefill behind it is worth
        for i, part in enumerate(parts):
            if own.lossy or computed_as(part, names[:i]) != wanted:
                last, wanted = i, "patched"
        if last < 0:
            return own.tenant
        parts = parts[: last + 1]
        facts = [
            [part.start, part.position, part.offset, part.kv and part.kv.key, patch and patch.key]
            + ([patch.formed, patch.created, patch.rank] if patch else [])
            for part, patch in zip(parts, [part.patch for part in parts], strict=True)
        ]
        fields = own.tenant, own.fingerprint, own.anchor, own.kv, json.dumps(facts)
        return digest("kamera.recipe.salt.v1", *fields)[:32]

    def check(self, context: Context) -> None:
        """Raise IncompatibleChunk unless ``context`` is of the recipe's model, anchor, tenant and form."""
        words = {"fingerprint": "backbone", "anchor": "system prompt", "tenant": "tenant", "kv": "form of KV"}
        for name, what in words.items():
            mine, theirs = str(getattr(self.context, name)), str(getattr(context, name))
            if mine != theirs:
                raise IncompatibleChunk(
                    f"the recipe is of {what} {quote(mine[:12])}, this is {quote(theirs[:12])}"
                )

    def to_json(self) -> str:
        """The recipe as JSON, behind a digest of its text."""
        text = _text_of(self)
        return f"{_opening(text)}{text}"

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """A recipe out of `to_json`. Raises InvalidRecipe for anything else."""
        try:
            body = text[len(_opening("")) :]
            if not text.startswith(_opening(body)):
                raise ValueError("not as it was written")
            return _read(**json.loads(text)["recipe"])
        except InvalidRecipe:
            raise
        except _MALFORMED as error:
            raise InvalidRecipe(
                f"{quote(text)} is not what to_json writes ({type(error).__name__}): it was edited, or is of "
                "another kind"
            ) from None


def antecedent_name(chunk_id: str, antecedents: tuple[str, ...], names: tuple[str, ...]) -> str:
    """A chunk conditioned on ``antecedents``, as an antecedent of what follows; ``names`` stand before it."""
    if antecedents == names:
        return chunk_id
    return survivor_id(chunk_id, digest("kamera.lineage.v1", *antecedents)[:32])


def computed_as(part: Part, names: tuple[str, ...]) -> Guarantee | None:
    """What a prefill behind ``names`` is worth that made a part's KV; None if it was made otherwise.

    That of a canonical, right behind the anchor, is exact.
    """
    kv = part.kv
    if kv is None or part.patch is not None or any(part.offset):
        return None
    if kv.kind == "canonical":
        return None if names else "exact"
    if kv.antecedents != names:
        return None
    return next((g for g in COMPUTED if kv.base == computed_base(g)), None)


COMPUTED: tuple[Guarantee, ...] = ("exact", "patched")
"""Guarantees of prefills whose KV an engine's harvest stores."""


def _contradiction(recipe: Recipe) -> str:
    """What is wrong with a recipe, in a few words; "" for nothing."""
    own, anchor, start = recipe.context, recipe.anchor, len(recipe.anchor_ids)
    axes = len(recipe.parts[0].position) if recipe.parts else 0
    if anchor is not None and (anchor.kind, anchor.chunk_id) != ("anchor", own.anchor):
        return "its anchor is not that of its context"
    if ids_digest(recipe.anchor_ids) != own.anchor:
        return "the anchor's token ids are not those of its context"
    rows = [] if anchor is None else [anchor]
    for part in recipe.parts:
        wrong, kv, patch = "", part.kv, part.patch
        home = (patch.base if patch else "") or own.anchor
        if part.start != start or not part.ids:
            wrong = "does not begin where the one before it ends"
        elif len(part.position) != axes or len(part.offset) != axes:
            wrong = "stands on other axes than the first one"
        elif part.guarantee not in GUARANTEES:
            wrong = f"has the guarantee {quote(part.guarantee)}"
        elif (kv is None) != bool(part.missing):
            wrong = "has neither KV nor a reason, or both"
        elif kv is not None and (kv.kind not in _BASES or kv.chunk_id != part.chunk_id):
            wrong = "is shown from KV of another"
        elif kv is not None and kv.context.anchor != (home if kv.kind == "canonical" else own.anchor):
            wrong = "is shown from KV behind another system prompt"
        elif patch is not None:
            target = patch.chunk_id, patch.context.anchor
            if patch.kind not in _PATCHES or target != (part.chunk_id, own.anchor):
                wrong = "has a patch of another"
            elif kv is None or kv.kind != "canonical":
                wrong = "has a patch for other KV than its own"
            rows.append(patch)
        if wrong:
            return f"chunk {part.chunk_id[:12]} {wrong}"
        if kv is not None:
            rows.append(kv)
        start += len(part.ids)
    for row in rows:
        key = row.key  # a ValueError for what names no object
        if row.context != _context(own, row.kind, row.context.anchor):
            return f"object {key[:12]} is of another context"
    return ""


# -- JSON ------------------------------------------------------------------------------------------


def _text_of(recipe: Recipe) -> str:
    """All that a recipe says; equal texts are equal recipes."""
    own, places, last = recipe.context, dict[str, int](), tuple[str, ...]()

    def numbers(antecedents: tuple[str, ...]) -> list[int]:
        nonlocal last
        if not antecedents:
            return []
        same = len(last) if antecedents[: len(last)] == last else 0
        last = antecedents
        return [same, *[places.setdefault(name, len(places)) for name in antecedents[same:]]]

    def row(key: RowKey | None) -> list[Any] | None:
        if key is None:
            return None
        anchor = "" if key.context.anchor == own.anchor else key.context.anchor
        order = numbers(key.antecedents)
        return [key.kind, anchor, order, key.base, key.formed, key.created, key.rank]

    parts = [
        [
            places.setdefault(p.chunk_id, len(places)), len(p.ids), p.position, p.offset,
            p.guarantee, numbers(p.antecedents), row(p.kv), row(p.patch), p.missing,
        ]
        for p in recipe.parts
    ]  # fmt: skip
    document = {
        "anchor": recipe.anchor is not None,
        "anchor_tokens": len(recipe.anchor_ids),
        "context": [own.fingerprint, own.anchor, own.tenant, own.kv],
        "ids": base64.b64encode(np.array(recipe.ids, dtype="<i4").tobytes()).decode(),
        "names": list(places),
        "parts": parts,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "}"


def _opening(text: str) -> str:
    """What stands before a recipe's ``text``."""
    return f'{{"digest":"{digest("kamera.recipe.json.v1", text)}","recipe":'


def _read(
    *,
    anchor: bool,
    anchor_tokens: int,
    context: list[str],
    ids: str,
    names: list[str],
    parts: list[list[Any]],
) -> Recipe:
    """The recipe of a document; what is of another type fails."""
    own, start, slots, last, total = Context(*context), anchor_tokens, list[Part](), tuple[str, ...](), 0
    whole = tuple(np.frombuffer(base64.b64decode(ids, validate=True), dtype="<i4").tolist())
    _check_types({str}, (*context, *names))
    _check_types({int}, (anchor_tokens,))

    def lineage(numbers: list[int]) -> tuple[str, ...]:
        nonlocal last, total
        _check_types({int}, numbers)
        if not numbers:
            return ()
        same, *others = numbers
        last = last[:same] + tuple([names[i] for i in others])
        total += len(last)
        if total > _MOST:
            raise ValueError(f"more than {_MOST} antecedents")
        return last

    def row(fields: list[Any] | None, chunk: str) -> RowKey | None:
        if fields is None:
            return None
        kind, home, numbers, base, formed, created, rank = fields
        _check_types({str}, (kind, home, base))
        _check_types({str, NoneType}, (formed,))
        _check_types({float, NoneType}, (created,))
        _check_types({int, NoneType}, (rank,))
        return RowKey.of(own, kind, chunk, lineage(numbers), base, formed, created, rank, anchor=home)

    for place, length, position, offset, worth, order, kv, patch, lacks in parts:
        _check_types({int}, (start, place, length, *position, *offset))
        _check_types({str}, (worth, lacks))
        chunk, antecedents, stop = names[place], lineage(order), start + length
        rows, stand = (row(kv, chunk), row(patch, chunk)), (tuple(position), tuple(offset))
        slots.append(Part(chunk, whole[start:stop], start, *stand, worth, antecedents, *rows, lacks))
        start = stop
    anchor_key = RowKey.of(own, "anchor", own.anchor) if anchor else None
    return Recipe(own, anchor_key, whole[:anchor_tokens], tuple(slots))


def _check_types(kinds: set[type], values: Iterable[Any]) -> None:
    if not {*map(type, values)} <= kinds:
        raise TypeError(f"other than {kinds}")
