"""Rows of the objects stored for one context, never tensors; one look-up per object and operation.

Also which stored patch serves: the one asked for, one formed behind fewer chunks, or within a policy's
envelope the one of *other* antecedents that are nearest to the present ones (appendix D).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from kamera.ops import PatchBudget
from kamera.patches.background import Background
from kamera.patches.losses import STORE_ERRORS, Losses
from kamera.store import (
    ChunkStore,
    Context,
    ObjectInfo,
    behind_survivors,
    canonical_key,
    chunks_of,
    computed_base,
    object_key,
    patch_key,
    why_missed,
)
from kamera.trust import Guarantee, ReusePolicy, at_least, guarantee_named, outranks

logger = logging.getLogger(__name__)

_BASE, _ELSEWHERE = "base of ", "elsewhere "  # no key begins so

_Answer = TypeVar("_Answer")


class Catalogue:
    """Looks up headers and index rows for an operation. Safe to use from several threads.

    Inside `operation` a thread looks up each object once; outside of it, every time. A look-up waits for a
    patch that is in progress in ``queue``. An unusable object counts as absent, and the notes say so; store
    errors go to ``losses``.

    A row may be wrong: a caller that reads the tensors and finds something else calls `mark_wrong`, and
    decides again.
    """

    def __init__(self, store: ChunkStore, context: Context, queue: Background | None, losses: Losses) -> None:
        self.store = store
        self.context = context
        self.losses = losses
        self.prefilled: set[tuple[str, tuple[str, ...]]] = set()
        """Chunks with the antecedents behind which this window, or a fork of it, has prefilled them."""
        self.followed: set[tuple[str, tuple[str, ...]]] = set()
        """Chunks with the predecessor behind which background work forms, or has formed, their patch."""
        self.has_departed = False
        """True once a chunk has left this window, or a fork of it."""
        self._queue = queue
        self._local = threading.local()
        self._said: set[str] = set()  # reasons of misses that were logged

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Context in which this thread asks the store once for each object."""
        here = self._local.__dict__
        if here:
            yield  # the outer one's
            return
        here.update(known={}, lies=set(), read=set())
        try:
            yield
        finally:
            here.clear()

    def gather(self) -> bool:
        """Ask a remote at once for all rows looked up since the last call; False when none is left to ask.

        Between two calls a row that is not known yet counts as absent, and the caller makes its plan again
        after each. A remote answers a hundred questions as fast as one.
        """
        here = self._local.__dict__
        if not (here and self.store.has_remote):
            return False
        asked: dict[str, tuple[str, str]] | None = here.pop("asked", None)  # an error ends the gathering
        if asked == {}:
            return False
        if asked:
            here["known"].update(self._ask(asked))
        here["asked"] = {}
        return True

    def canonical(self, chunk_id: str) -> ObjectInfo | None:
        """The row of a chunk's canonical."""
        return self._row(canonical_key(self.context, chunk_id), "canonical", chunk_id)

    def computed(
        self, chunk_id: str, antecedents: tuple[str, ...], guarantee: Guarantee
    ) -> ObjectInfo | None:
        """The row of a chunk's KV that an engine has computed behind ``antecedents``, worth ``guarantee``."""
        context, base = replace(self.context, kv="as-is"), computed_base(guarantee)
        key = object_key("conditioned", context, chunk_id, antecedents, base)
        return self._row(key, "conditioned", chunk_id)

    def base(self, chunk_id: str) -> ObjectInfo | None:
        """The row of a canonical behind another anchor, to which this context's patches can be added.

        The oldest one of the same model, tenant and form; a remote is not asked.
        """

        def choose() -> ObjectInfo | None:
            own = self.context
            rows = (row for row in self._elsewhere(chunk_id) if row.context.anchor != own.anchor)
            return next((row for row in rows if replace(row.context, anchor=own.anchor) == own), None)

        return self._look_up_once(_BASE + chunk_id, choose)

    def note_miss(self, chunk_id: str) -> None:
        """Note, and log once, why a chunk runs that this operation has missed: it is of another context."""
        if self._local.__dict__.get("known", {}).get(canonical_key(self.context, chunk_id), "") is not None:
            return
        own, rows = self.context, self._elsewhere(chunk_id)
        reasons = [why_missed(own, row.context) for row in rows if row.context != own]
        if reasons:
            reason = min(reversed(reasons), key=lambda text: text.count(";"))
            self.losses.note(f"chunk {chunk_id[:12]} is stored, but not for this window: {reason}")
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("chunks in %s are not stored for this window: %s", self.store.url, reason)

    def _elsewhere(self, chunk_id: str) -> Sequence[ObjectInfo]:
        """The rows of a chunk's canonicals under all contexts, the oldest first; a remote is not asked."""

        def ask() -> Sequence[ObjectInfo]:
            with self.losses.absorb_errors(f"chunk {chunk_id[:12]} was not looked up"):
                return self.store.ls("canonical", chunk_id=chunk_id, here=True)
            return ()

        return self._look_up_once(_ELSEWHERE + chunk_id, ask)

    def mark_base_missing(self, chunk_id: str) -> None:
        """Mark the result of `base` as unusable: there is no base for the rest of the operation."""
        if here := self._local.__dict__:
            here["known"][_BASE + chunk_id] = None

    def has_canonical(self, chunk_id: str) -> bool:
        """True if a chunk's canonical is stored, or was read in this operation."""
        if chunk_id in self._local.__dict__.get("read", ()):
            return True
        return self._row(canonical_key(self.context, chunk_id), "canonical", chunk_id) is not None

    def is_archived(self, chunk_id: str) -> bool:
        """True if a chunk is archived: in this context, or behind another anchor as a base."""
        return self.canonical(chunk_id) is not None or self.base(chunk_id) is not None

    def mark_read(self, chunk_id: str) -> None:
        """Record that a chunk's canonical was read, which proves that it is stored."""
        if here := self._local.__dict__:
            here["read"].add(chunk_id)

    def patch(
        self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = ""
    ) -> ObjectInfo | None:
        """The row of a chunk's patch behind ``antecedents``: in this order, or for ``"orbit"`` as a set.

        ``base`` as in `PatchRecord`.
        """
        key = patch_key(self.context, chunk_id, antecedents, kind, base)
        if key in self._local.__dict__.get("lies", ()):
            return None
        return self._row(key, "patch", chunk_id)

    def patch_within(
        self,
        chunk_id: str,
        length: int,
        antecedents: Sequence[str],
        kind: str,
        policy: ReusePolicy,
        base: str = "",
    ) -> ObjectInfo | None:
        """The row of `patch`, if it `serves` a chunk of ``length`` tokens under ``policy``."""
        row = self.patch(chunk_id, antecedents, kind, base)
        return row if row and serves(row, policy.budget, length, policy.max_error) else None

    def patches_of(self, chunk_id: str) -> list[ObjectInfo]:
        """All patches of a chunk behind any antecedents, but for those with a base or behind survivors."""
        self._await_patches(chunk_id)
        return [
            info
            for info in self.store.ls(chunk_id=chunk_id)
            if info.rank is not None
            and info.context == self.context
            and not info.base
            and not behind_survivors(info.antecedents)
            and self._local.__dict__.get("known", {}).get(_key(info), info) is not None
        ]

    def orders(self, chunk_id: str) -> set[tuple[str, ...]]:
        """The antecedents, in order, behind which a patch of a chunk is stored, with a base or without."""
        self._await_patches(chunk_id)
        with self.losses.absorb_errors(f"patches of chunk {chunk_id[:12]} were not listed"):
            rows = self.store.ls(chunk_id=chunk_id, context=self.context)
            return {row.antecedents for row in rows if row.rank is not None and row.kind != "orbit"}
        return set()

    def near(self, chunk_id: str, antecedents: Sequence[str], limit: float) -> list[Near]:
        """Patches of a chunk whose antecedents diverge from these by at most ``limit``, nearest first."""
        if "asked" in self._local.__dict__:
            return []  # while rows are gathered: they are listed once, for the plan that holds
        with self.losses.absorb_errors(f"patches near chunk {chunk_id[:12]} were not looked up"):
            alike = likeness(self.store, self.context)
            return nearest(self.patches_of(chunk_id), antecedents, limit, alike)
        return []

    def has_refused(self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = "") -> bool:
        """True if this operation found a patch missing or different from its row."""
        lies: set[str] = self._local.__dict__.get("lies") or set()
        return bool(lies) and patch_key(self.context, chunk_id, antecedents, kind, base) in lies

    def mark_wrong(self, key: str) -> None:
        """Mark the row under ``key`` as wrong: the object counts as absent for the rest of the operation."""
        if here := self._local.__dict__:
            here["known"][key] = None
            here["lies"].add(key)

    def forget(self, key: str) -> None:
        """Drop the row under ``key``, since the stored object has changed; it is looked up anew."""
        if here := self._local.__dict__:
            here["known"].pop(key, None)

    # -- inside --------------------------------------------------------------------------------

    def _await_patches(self, chunk_id: str) -> None:
        if self._queue is not None:
            self._queue.flush_named((self.context, chunk_id))

    def _row(self, key: str, kind: str, chunk_id: str) -> ObjectInfo | None:
        """The row under ``key``, of a chunk's object of this kind; in an operation asked for once."""
        here = self._local.__dict__
        known: dict[str, ObjectInfo | None] | None = here.get("known")
        if known is None:
            return self._ask({key: (kind, chunk_id)})[key]
        if key not in known:
            if "asked" in here:
                here["asked"][key] = kind, chunk_id
                return None
            known.update(self._ask({key: (kind, chunk_id)}))
        return known[key]

    def _ask(self, wanted: Mapping[str, tuple[str, str]]) -> dict[str, ObjectInfo | None]:
        """The rows under these keys, each of a kind and a chunk; what cannot be used counts as absent."""
        for kind, chunk_id in wanted.values():
            if kind == "patch":
                self._await_patches(chunk_id)
        try:
            found = self.store.look(self.context, wanted)
        except STORE_ERRORS as error:
            found = dict.fromkeys(wanted, error)
        rows = dict[str, ObjectInfo | None]()
        for key, (kind, chunk_id) in wanted.items():
            row = found[key]
            if isinstance(row, Exception):
                of = f"{'a patch of ' if kind == 'patch' else ''}chunk {chunk_id[:12]}"
                self.losses.miss(kind, of, row)
                row = None
            rows[key] = row
        return rows

    def _look_up_once(self, key: str, ask: Callable[[], _Answer]) -> _Answer:
        known = self._local.__dict__.get("known")
        if known is None:
            return ask()
        if key not in known:
            known[key] = ask()
        answer: _Answer = known[key]
        return answer


def _key(info: ObjectInfo) -> str:
    """The key by which a patch is looked up: in a sealed store the row has another name."""
    return patch_key(info.context, info.chunk_id, info.antecedents, info.kind)


class Stored(NamedTuple):
    """A stored patch: the guarantee it was ``formed`` behind, and whether it can be served as it is.

    It cannot below the budget asked for, or above the error that is allowed. One that is still to be stored
    has no ``row``.
    """

    formed: Guarantee
    serves: bool
    row: ObjectInfo | None = None


def stored_patch(
    row: ObjectInfo | None, budget: PatchBudget, tokens: int, max_error: float | None
) -> Stored | None:
    """What a row says of the patch of a chunk of ``tokens`` tokens under ``budget``; None without a row."""
    if row is None:
        return None
    return Stored(guarantee_named(row.formed), serves(row, budget, tokens, max_error), row)


def serves(row: ObjectInfo, budget: PatchBudget, tokens: int, max_error: float | None) -> bool:
    """True if a row's patch of a chunk of ``tokens`` tokens meets ``budget`` and leaves out little enough.

    A patch of lower rank does not, unless its rank is already bounded by ``tokens``.
    """
    met = row.budget is not None and budget.is_met_by(row.budget, tokens)
    return met and (max_error is None or (row.error is not None and row.error <= max_error))


def worth_harvesting(
    stored: Iterable[Stored | None],
    antecedents: tuple[str, ...],
    formed: Guarantee,
    leading: bool = False,
) -> bool:
    """True if the patch of a prefill behind ``antecedents`` is worth storing.

    Without antecedents it is only if ``leading``: it then corrects the conditioning on another anchor.
    ``stored`` are the patches behind the `possible_names` these (None: there is none), looked at only if they
    decide. A copy conditioned by near or blind KV carries their error and is not harvested, and a store keeps
    what was formed behind stronger KV.
    """
    if not (antecedents or leading) or not at_least(formed, "survivor"):
        return False
    return not any(
        (i == 0 and outranks(patch.formed, formed)) or (patch.serves and at_least(patch.formed, formed))
        for i, patch in enumerate(stored)
        if patch is not None
    )


def possible_names(antecedents: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The names under which a patch for ``antecedents`` may be stored, these first.

    A patch that was formed behind exactly these chunks serves survivors too, and better.
    """
    return tuple(dict.fromkeys((antecedents, chunks_of(antecedents))))


# -- patches of other antecedents ------------------------------------------------------------------


Alike = Callable[[str, str], float]
"""Likeness of two chunks as antecedents: 0.0 none, 1.0 the same."""

ALIKE_ABOVE = 0.98
"""Cosine of two embeddings above which pictures count as partly equal, in proportion up to 1.0."""


class Near(NamedTuple):
    """A stored patch of other antecedents, and their divergence from the present ones."""

    divergence: float
    patch: ObjectInfo


def divergence(these: Sequence[str], those: Sequence[str], alike: Alike | None = None) -> float:
    """Share of chunks in which two antecedent sets differ: 0.0 the same set, 1.0 none in common.

    A multiset Jaccard distance; order does not count. With ``alike`` the chunks that only one of the two sets
    has are paired, the most alike first, and a pair counts as that much of one chunk in common. The paper's
    own measure (cosine of features) separates safe from unsafe reuse only softly, and so does this one: a
    hint, never a proof.
    """
    a, b = Counter(these), Counter(those)
    common = float((a & b).total())
    if alike is not None:
        common += _pair(list((a - b).elements()), list((b - a).elements()), alike)
    union = len(these) + len(those) - common
    return 0.0 if union == 0 else 1.0 - common / union


def disorder(these: Sequence[str], those: Sequence[str]) -> float:
    """Share of the pairs of chunks common to both that are in another order: 0.0 none, 1.0 all."""
    places = {chunk: i for i, chunk in enumerate(those)}
    shared = [places[chunk] for chunk in dict.fromkeys(these) if chunk in places]
    pairs = [(x, y) for i, x in enumerate(shared) for y in shared[i + 1 :]]
    return sum(x > y for x, y in pairs) / len(pairs) if pairs else 0.0


def nearest(
    patches: Iterable[ObjectInfo], antecedents: Sequence[str], limit: float, alike: Alike | None = None
) -> list[Near]:
    """Stored patches whose antecedents diverge from these by at most ``limit``, nearest first.

    For the ranking, not for the limit, a fully reversed order halves the share that the sets have in common
    (an orbit patch has no order). Among equally near patches the latest comes first.
    """

    def rank(near: Near) -> tuple[float, float, float]:
        patch = near.patch
        order = 0.0 if patch.kind == "orbit" else disorder(patch.antecedents, antecedents)
        return 1.0 - (1.0 - near.divergence) * (1.0 - order / 2), near.divergence, -patch.created

    found = (Near(divergence(p.antecedents, antecedents, alike), p) for p in patches)
    return sorted((near for near in found if near.divergence <= limit), key=rank)


def likeness(store: ChunkStore, context: Context) -> Alike:
    """Likeness of stored pictures by their embeddings; 0.0 for a chunk without one."""
    held: dict[str, np.ndarray | None] = {}

    def embedding(chunk: str) -> np.ndarray | None:
        if chunk not in held:
            held[chunk] = store.embedding(context, chunk)
        return held[chunk]

    def alike(one: str, other: str) -> float:
        a, b = embedding(one), embedding(other)
        if a is None or b is None or a.shape != b.shape:
            return 0.0
        return min(1.0, max(0.0, (float(a @ b) - ALIKE_ABOVE) / (1.0 - ALIKE_ABOVE)))

    return alike


def _pair(these: list[str], those: list[str], alike: Alike) -> float:
    """Likeness summed over disjoint pairs, the most alike first."""
    scores = sorted(
        ((alike(x, y), i, j) for i, x in enumerate(these) for j, y in enumerate(those)), reverse=True
    )
    total, left, right = 0.0, set(range(len(these))), set(range(len(those)))
    for score, i, j in scores:
        if i in left and j in right:
            left.remove(i)
            right.remove(j)
            total += score
    return total
