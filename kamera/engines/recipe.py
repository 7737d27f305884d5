"""A recipe: a window written down for an engine that schedules by itself, and the contract to show one.

It names stored objects and holds no tensor. JSON both ways, strict: what `Recipe.to_json` would not write is
refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, get_args

import cattrs
from cattrs.gen import make_dict_structure_fn
from cattrs.preconf.json import make_converter

from kamera.engines.base import Written
from kamera.errors import IncompatibleChunk, InvalidRecipe, quote
from kamera.ops import digest, ids_digest
from kamera.store import Context, object_key
from kamera.trust import GUARANTEES, Guarantee

Offset = tuple[int, ...]
"""Whole positions, one number per axis."""

Base = Literal["canonical", "conditioned"]
"""What a part's stored KV is: KV(B|∅), or KV that was run behind its antecedents."""

_PATCHES = ("exact", "sampled", "orbit")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class RowKey:
    """An object of the store by its name, and the ``key`` that follows from it (`kamera.store.object_key`).

    ``anchor`` is that of the object's context: the recipe's own, or of the canonical that a patch of another
    ``base`` is added to. ``base``: of a patch as in `PatchRecord`, of conditioned KV the digest of its
    content. A patch was ``formed`` behind that guarantee and ``created`` then (seconds since 1970): one that
    was formed again is another. At most ``rank`` columns of it are applied (None: all).
    """

    kind: str
    chunk_id: str
    anchor: str
    key: str
    antecedents: tuple[str, ...] = ()
    base: str = ""
    formed: str | None = None
    created: float | None = None
    rank: int | None = None

    def context(self, own: Context) -> Context:
        """The context of the object, in a recipe of the context ``own``."""
        kv = "as-is" if self.kind in ("anchor", "conditioned") else own.kv
        return replace(own, anchor=self.anchor, kv=kv)

    @classmethod
    def of(
        cls,
        own: Context,
        kind: str,
        chunk_id: str,
        antecedents: tuple[str, ...] = (),
        base: str = "",
        *,
        anchor: str | None = None,
    ) -> RowKey:
        """The name of an object in a recipe of the context ``own``; ``anchor`` if it is not its own."""
        return cls(kind, chunk_id, own.anchor if anchor is None else anchor, "", antecedents, base).keyed(own)

    def keyed(self, own: Context) -> RowKey:
        """The same with the key that follows from its other fields. Raises ValueError for no object's."""
        made = replace(self, key=self.derived(own))
        made.__dict__["_derived"] = own, made.key  # recipes that share it need not derive it again
        return made

    def derived(self, own: Context) -> str:
        """The key that follows from the other fields. Raises ValueError for what names no object."""
        known, key = self.__dict__.get("_derived", (None, ""))
        if known is own:
            return str(key)
        return object_key(self.kind, self.context(own), self.chunk_id, self.antecedents, self.base)


@dataclass(frozen=True)
class Part:
    """A slot: tokens ``ids`` of the rendered prompt, placeholders expanded, from ``start`` on.

    ``position`` is its lowest position on each axis as the model counts this sequence, ``offset`` how far its
    stored KV is turned to get there. ``base`` says what that KV is, ``guarantee`` what it is worth here,
    ``made`` what it is worth behind exactly its ``antecedents``, on which it is conditioned
    (`kamera.store.survivor` names those that knew others). ``patch`` is added to a canonical before it turns.
    ``missing``: why this part cannot be shown elsewhere; "" if it can. Then, and only then, there is a
    ``kv``.
    """

    chunk_id: str
    ids: tuple[int, ...]
    start: int
    position: Offset
    offset: Offset
    base: Base
    guarantee: Guarantee
    made: Guarantee
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
    ``tail`` and ``reopen`` are the chat template's text after a question
    and after an answer. Raises InvalidRecipe for parts that contradict each other.
    """

    context: Context
    anchor: RowKey | None
    anchor_ids: tuple[int, ...]
    parts: tuple[Part, ...]
    tail: str = ""
    reopen: str = ""

    def __post_init__(self) -> None:
        wrong = _contradiction(self)
        if wrong:
            raise InvalidRecipe(f"no recipe: {wrong}; take one from window.recipe()")

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole sequence."""
        return (*self.anchor_ids, *(i for part in self.parts for i in part.ids))

    @property
    def borders(self) -> tuple[int, ...]:
        """Start of each part, and the end of the last one."""
        lengths = (part.length for part in self.parts)
        return tuple(accumulate(lengths, initial=len(self.anchor_ids)))

    @property
    def missing(self) -> tuple[str, ...]:
        """Why parts cannot be shown elsewhere, a line each; empty for a recipe that any executor can show."""
        said = ["the system prompt is not stored yet: window.flush()"] if self.anchor is None else []
        named = [(i, part) for i, part in enumerate(self.parts) if part.missing]
        return (*said, *[f"slot {i} (chunk {part.chunk_id[:12]}): {part.missing}" for i, part in named])

    @property
    def leading(self) -> Recipe:
        """The parts in front of the first that is missing."""
        count = next((i for i, part in enumerate(self.parts) if part.missing), len(self.parts))
        if count == len(self.parts):
            return self
        return replace(self, parts=self.parts[:count])

    @cached_property
    def salt(self) -> str:
        """Keeps apart what a prefix cache, which knows tokens alone, would take for the same.

        "" if every part is exact, of no tenant: then the sequence is what a prefill of its
        tokens makes. All exact recipes of a tenant share one. Else a digest of all that the KV depends on:
        equal recipes share it, and nobody else has it.
        """
        if all(part.guarantee == "exact" for part in self.parts):
            own = self.context.tenant
            return digest("kamera.recipe.tenant.v1", own)[:32] if own else ""
        facts = self._document()
        for text in ("tail", "reopen"):
            del facts[text]
        return digest("kamera.recipe.v2", json.dumps(facts, sort_keys=True))[:32]

    def check(self, context: Context) -> None:
        """Raise IncompatibleChunk unless ``context`` is of the recipe's model, anchor, tenant and form."""
        named = {"fingerprint": "backbone", "anchor": "system prompt", "tenant": "tenant", "kv": "form of KV"}
        for name, what in named.items():
            mine, theirs = str(getattr(self.context, name)), str(getattr(context, name))
            if mine != theirs:
                raise IncompatibleChunk(
                    f"the recipe is of {what} {quote(mine[:12])}, this is {quote(theirs[:12])}"
                )

    def to_json(self) -> str:
        """The recipe as JSON."""
        return _text({**self._document(), "salt": self.salt})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """A recipe out of `to_json`. Raises InvalidRecipe for anything else."""
        try:
            document = json.loads(text)
            made = _converter().structure({k: v for k, v in document.items() if k != "salt"}, cls)
            written = made.to_json()
        except InvalidRecipe:
            raise
        except (*_MALFORMED, cattrs.BaseValidationError) as error:
            raise InvalidRecipe(
                f"{quote(text)} is no recipe ({type(error).__name__}): write it with to_json"
            ) from None
        if written != _text(document):  # a number as text, a salt of another recipe
            raise InvalidRecipe(
                f"{quote(text)} is not what to_json writes: it was edited, or is of another kind"
            )
        return made

    def _document(self) -> dict[str, Any]:
        told = _fields(self)
        return {**told, "context": {**told["context"], "probe": str(self.context.probe)}}


class Executor(Protocol):
    """Shows recipes: the live cache of transformers, or the pages of an engine that schedules by itself."""

    def show(self, recipe: Recipe) -> Written:
        """Bring the KV of a recipe, its anchor in front, to where the model attends to it.

        It shows all of the recipe or raises, and then nothing of it: IncompatibleChunk (of another backbone,
        tenant or form), NotTransferable (a part whose KV its own window has alone), StaleRecipe (an object is
        gone, or another by now), CorruptChunk.
        """
        ...


def _contradiction(recipe: Recipe) -> str:
    """What is wrong with a recipe, in a few words; "" for nothing."""
    own, bases = recipe.context, get_args(Base)
    axes = len(recipe.parts[0].position) if recipe.parts else 0
    anchor = recipe.anchor
    if anchor is not None and (anchor.kind, anchor.chunk_id) != ("anchor", own.anchor):
        return "its anchor is not that of its context"
    if ids_digest(recipe.anchor_ids) != own.anchor:
        return "the anchor's token ids are not those of its context"
    for start, part in zip(recipe.borders, recipe.parts, strict=False):
        what = f"chunk {part.chunk_id[:12]}"
        if part.start != start or not part.ids:
            return f"{what} does not begin where the one before it ends"
        if len(part.position) != axes or len(part.offset) != axes:
            return f"{what} stands on other axes than the first one"
        if not {part.guarantee, part.made} <= set(GUARANTEES) or part.base not in bases:
            return f"{what} has the guarantee {quote(part.guarantee)} of {quote(part.base)} KV"
        if (part.kv is None) != bool(part.missing):
            return f"{what} has neither KV nor a reason, or both"
        if part.kv is not None and (part.kv.kind, part.kv.chunk_id) != (part.base, part.chunk_id):
            return f"{what} is shown from KV of another"
        if part.patch is not None:
            if part.patch.kind not in _PATCHES or part.patch.chunk_id != part.chunk_id:
                return f"{what} has a patch of another"
            if part.base != "canonical" or (part.kv and part.kv.anchor != (part.patch.base or own.anchor)):
                return f"{what} has a patch for other KV than its own"
    rows = [anchor, *(row for part in recipe.parts for row in (part.kv, part.patch))]
    wrong = next((row for row in rows if row is not None and row.key != row.derived(own)), None)
    return "" if wrong is None else f"key {quote(wrong.key)} is not that of its own fields"


@cache
def _converter() -> cattrs.Converter:
    made = make_converter(forbid_extra_keys=True)
    texts = make_dict_structure_fn(_Context, made, _cattrs_forbid_extra_keys=True)
    made.register_structure_hook(Context, lambda value, _: Context(**vars(texts(value, _Context))))
    return made


@dataclass(frozen=True)
class _Context:
    """A context as a recipe writes it down."""

    fingerprint: str
    anchor: str
    tenant: str
    kv: str
    probe: str


def _fields(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples of them as lists; what else there is as it is, not copied."""
    if is_dataclass(value):
        return {field.name: _fields(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_fields(one) for one in value]
    return value


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
