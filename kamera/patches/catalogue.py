"""What is stored for one context: rows, never tensors. One look-up per object while an operation lasts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kamera.errors import CorruptChunk, KameraError, WrongKey
from kamera.ops import PatchBudget
from kamera.patches.forming import Forming
from kamera.patches.losses import Losses
from kamera.patches.near import Near, likeness, nearest
from kamera.store import ChunkStore, Context, ObjectInfo, behind_survivors, canonical_key, patch_key

logger = logging.getLogger(__name__)

_BASE = "base of "  # begins no key


class Catalogue:
    """Answers from headers and index rows what an operation may count on. Safe to use from several threads.

    Inside `operation` each object is asked for once, by that thread; outside of it every time. A patch that
    is still being formed is waited for. An object that cannot be used is not there, and the notes say so;
    what the store cannot answer goes to ``losses``.

    A row promises, it does not prove: whoever reads the tensors and finds something else calls `refuse`,
    and decides again.
    """

    def __init__(self, store: ChunkStore, context: Context, forming: Forming, losses: Losses) -> None:
        self.store = store
        self.context = context
        self.losses = losses
        self._forming = forming
        self._here = threading.local()

    @contextmanager
    def operation(self) -> Iterator[None]:
        """While it lasts, this thread asks the store once for each object."""
        outer = self._known
        if outer is None:
            self._here.known, self._here.lies, self._here.read = {}, set(), set()
        try:
            yield
        finally:
            self._here.known = outer

    def canonical(self, chunk_id: str) -> ObjectInfo | None:
        """The row of a chunk's canonical."""

        def ask() -> ObjectInfo | None:
            with self.losses.borne(f"chunk {chunk_id[:12]} was not looked up"):
                try:
                    return self.store.info(self.context, chunk_id)
                except (CorruptChunk, WrongKey) as error:
                    # the chunk is at hand, so it is prefilled and archived again
                    logger.warning("a stored canonical was refused: %s", error)
            return None

        return self._once(canonical_key(self.context, chunk_id), ask)

    def base(self, chunk_id: str) -> ObjectInfo | None:
        """The row of a canonical behind another anchor, to which this context's patches can be added.

        The oldest of the same model, tenant and form; of a remote's objects those at hand.
        """

        def ask() -> ObjectInfo | None:
            with self.losses.borne(f"chunk {chunk_id[:12]} was not looked up"):
                rows = self.store.ls("canonical", chunk_id=chunk_id, here=True)
                own = self.context
                others = (r for r in rows if r.context.anchor != own.anchor)
                return next((r for r in others if replace(r.context, anchor=own.anchor) == own), None)
            return None

        return self._once(_BASE + chunk_id, ask)

    def refuse_base(self, chunk_id: str) -> None:
        """What `base` gave cannot be used: for the rest of the operation there is none."""
        if self._known is not None:
            self._known[_BASE + chunk_id] = None

    def has_canonical(self, chunk_id: str) -> bool:
        """Whether a chunk's canonical is stored; one that this operation has read is."""
        if self._known is not None and chunk_id in self._here.read:
            return True
        return self.canonical(chunk_id) is not None

    def holds(self, chunk_id: str) -> bool:
        """Whether a chunk is archived: here, or behind another anchor as a base."""
        return self.canonical(chunk_id) is not None or self.base(chunk_id) is not None

    def was_read(self, chunk_id: str) -> None:
        """A chunk's canonical was read, and so it is there."""
        if self._known is not None:
            self._here.read.add(chunk_id)

    def patch(
        self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = ""
    ) -> ObjectInfo | None:
        """The row of a chunk's patch behind ``antecedents``: this order, or for ``"orbit"`` this set.

        ``base`` as in `PatchRecord`.
        """

        def ask() -> ObjectInfo | None:
            self._forming.settle(chunk_id)
            with self.losses.borne(f"a patch of chunk {chunk_id[:12]} was not looked up"):
                try:
                    return self.store.info(self.context, chunk_id, antecedents, kind, base)
                except (CorruptChunk, WrongKey) as error:
                    self.told_refused(error)
            return None

        if self.refused(chunk_id, antecedents, kind, base):
            return None
        return self._once(patch_key(self.context, chunk_id, antecedents, kind, base), ask)

    def patch_within(
        self,
        chunk_id: str,
        length: int,
        antecedents: Sequence[str],
        kind: str,
        budget: PatchBudget,
        base: str = "",
    ) -> ObjectInfo | None:
        """`patch`, if it is as large as ``budget`` wants of a chunk of ``length`` tokens.

        One held shorter is a miss, unless that was all the chunk has.
        """
        row = self.patch(chunk_id, antecedents, kind, base)
        return row if row and row.budget and budget.met_by(row.budget, length) else None

    def patches_of(self, chunk_id: str) -> list[ObjectInfo]:
        """All patches of a chunk, whatever their antecedents; none that was formed behind survivors."""
        self._forming.settle(chunk_id)
        return [
            info
            for info in self.store.ls(chunk_id=chunk_id)
            if info.rank is not None
            and info.context == self.context
            and not info.base
            and not behind_survivors(info.antecedents)
            and (self._known or {}).get(_key(info), info) is not None
        ]

    def near(self, chunk_id: str, antecedents: Sequence[str], limit: float) -> list[Near]:
        """Patches of a chunk whose antecedents diverge from these by at most ``limit``, nearest first."""
        with self.losses.borne(f"patches near chunk {chunk_id[:12]} were not looked up"):
            alike = likeness(self.store, self.context)
            return nearest(self.patches_of(chunk_id), antecedents, limit, alike)
        return []

    def unkept(self, chunk_id: str) -> bool:
        """Whether the store has not taken a chunk's canonical so far."""
        return chunk_id in self.losses.unkept

    def refused(self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = "") -> bool:
        """Whether this operation has found out that a patch is not what it was said to be."""
        return patch_key(self.context, chunk_id, antecedents, kind, base) in (self._lies or ())

    def refuse(self, key: str) -> None:
        """The row under ``key`` lied: for the rest of the operation the object is not there."""
        if self._known is not None:
            self._known[key] = None
            self._here.lies.add(key)

    def forget(self, key: str) -> None:
        """What is stored under ``key`` has changed: it is asked for anew."""
        if self._known is not None:
            self._known.pop(key, None)

    def told_refused(self, error: KameraError) -> None:
        """Say that a patch was not taken."""
        logger.warning("a stored patch was refused: %s", error)
        self.losses.note(f"patch refused: {error}")

    # -- inside --------------------------------------------------------------------------------

    @property
    def _known(self) -> dict[str, ObjectInfo | None] | None:
        known: dict[str, ObjectInfo | None] | None = getattr(self._here, "known", None)
        return known

    @property
    def _lies(self) -> set[str] | None:
        return None if self._known is None else self._here.lies

    def _once(self, key: str, ask: Callable[[], ObjectInfo | None]) -> ObjectInfo | None:
        known = self._known
        if known is None:
            return ask()
        if key not in known:
            known[key] = ask()
        return known[key]


def _key(info: ObjectInfo) -> str:
    """The key by which a patch is looked up: in a sealed store the row has another name."""
    return patch_key(info.context, info.chunk_id, info.antecedents, info.kind)
