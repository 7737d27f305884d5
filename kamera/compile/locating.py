"""Ids of the chunks of a plan; missing canonicals are formed on the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kamera.compile.canonicals import Canonicals
from kamera.compile.lookup import Lookup
from kamera.compile.plan import ChunkSource, Described, Stored
from kamera.compile.tasks import Cost, Found, Sources
from kamera.content import Chunk
from kamera.engines.hf import Backbone
from kamera.errors import KameraError, StoreError, StoreVersionError, UnknownChunk, UnreadableMedia
from kamera.patches import Facts, Former
from kamera.store import ChunkStore


class NotStored(KameraError):
    """An archived object is not in the store afterwards."""


class Locator:
    """Locates chunks for one worker. Chunks of one shape are collected until they fill a forward."""

    def __init__(self, backbone: Backbone, store: ChunkStore, canonicals: Canonicals) -> None:
        self._backbone = backbone
        self._store = store
        self._canonicals = canonicals

    def locate(
        self, lookup: Lookup, former: Callable[[], Former], task: Sources, cost: Cost
    ) -> tuple[Found, ...]:
        """Every source of ``task``, in order; errors of single chunks are in `Found.error`.

        ``former`` is called only if something has to be formed, because it prefills the anchor. Raises
        StoreError and StoreVersionError.
        """
        seen: list[Found | Facts] = []
        groups: dict[Hashable, list[Facts]] = {}
        begun: set[str] = set()
        why: dict[str, str] = {}  # errors by chunk id
        for i, source in enumerate(task.sources):
            seen.append(there := self._look(lookup, former, source))
            if isinstance(there, Found) or there.chunk_id in begun:
                continue
            begun.add(there.chunk_id)
            shape = self._canonicals.form_of(former(), there)
            group = groups.setdefault(shape, [])
            group.append(there)
            if shape is None or len(group) == self._canonicals.rows(there):
                more = len(task.sources) - i - 1
                why |= self._form(lookup, former(), groups.pop(shape), shape, more, cost)
        for group in groups.values():
            why |= self._form(lookup, former(), group, None, 0, cost)
        return tuple(_found(s, there, why) for s, there in zip(task.sources, seen, strict=True))

    def facts(self, source: Described, former: Former) -> Facts:
        """A chunk from its content, encoded. Raises UnreadableMedia and the errors of chunk building."""
        return _encoded(self._built(source), former)

    def _look(self, lookup: Lookup, former: Callable[[], Former], source: ChunkSource) -> Found | Facts:
        """A stored or unavailable chunk, or the facts of one to be formed."""
        try:
            if isinstance(source, Stored):
                info = self._store.info(lookup.context, source.chunk_id)
                if info is None:
                    raise UnknownChunk(f"chunk {source.chunk_id[:12]} has left {self._store.url!r}")
                return Found(source, source.chunk_id, info.tokens)
            chunk = self._built(source)
            if lookup.has_canonical(chunk.id):
                return Found(source, chunk.id, chunk.num_tokens)
            facts = _encoded(chunk, former())
            self._backbone.check_positions(former().alone(facts))
            return facts
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            return Found(source, error=str(error))

    def _built(self, source: Described) -> Chunk:
        try:
            return self._backbone.chunk([dict(item) for item in source.items])
        except KameraError:
            raise
        except ValueError as error:  # the processor's own error, for example for a picture too narrow
            raise UnreadableMedia(f"{source.key[:80]} was refused by the processor: {error}") from error

    def _form(
        self,
        lookup: Lookup,
        former: Former,
        group: Sequence[Facts],
        shape: Hashable | None,
        more: int,
        cost: Cost,
    ) -> dict[str, str]:
        """Form the canonicals of a group; returns errors by chunk id."""
        try:
            self._canonicals.archive(former, group, shape, more, cost)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            if len(group) == 1:
                return {group[0].chunk_id: str(error)}
            each = [self._form(lookup, former, [facts], None, 0, cost) for facts in group]
            return {chunk_id: why for one in each for chunk_id, why in one.items()}
        lost: dict[str, str] = {}
        for facts in group:
            info = self._store.info(lookup.context, facts.chunk_id)
            if info is None:
                lost[facts.chunk_id] = not_stored(facts.chunk_id, self._store)
            else:
                cost.bytes += info.bytes
        return lost


def not_stored(chunk_id: str, store: ChunkStore) -> str:
    """The message of a `NotStored`."""
    return (
        f"chunk {chunk_id[:12]} was prefilled but {store!r} does not hold the result: a memory store "
        "evicted it; give the store more memory"
    )


def _encoded(chunk: Chunk, former: Former) -> Facts:
    return former.encodings.stored(chunk) or former.encodings.made(chunk)


def _found(source: ChunkSource, there: Found | Facts, why: dict[str, str]) -> Found:
    if isinstance(there, Found):
        return there
    if there.chunk_id in why:
        return Found(source, error=why[there.chunk_id])
    return Found(source, there.chunk_id, there.length, formed=True)
