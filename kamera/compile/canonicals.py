"""Chunks of a plan are located, and the canonicals that are missing are formed.

Canonicals are formed alone, or several in one forward after a trial has shown that no bit changes. Stored
objects must not depend on which others were missing. So chunks share a forward only if their tensors
have equal shapes, in batches of the tried size, and after all rows of one such batch agreed with forwards of
their own: a matrix kernel is chosen by shape, and its order of summation does not depend on values. A trial
holds for one process; nothing is assumed of other machines.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch

from kamera.compile.clock import Clock
from kamera.compile.plan import ByContent, ById, ChunkSource
from kamera.compile.prompt import PromptObjects
from kamera.compile.tasks import Location, TaskCost
from kamera.content import Chunk
from kamera.engines.hf import HfEngine
from kamera.errors import KameraError, StoreError, StoreVersionError, UnknownChunk, UnreadableMedia
from kamera.ops import KV
from kamera.patches import MOST_TOKENS, Copy, Facts, Former, pay, prefilled_together

logger = logging.getLogger(__name__)

WORTH = 2
"""Fewest batches of one shape for which a trial (one extra forward of a batch) is run."""


class Canonicals:
    """Locates chunks for one worker, and forms canonicals; at most ``batch`` share a forward."""

    def __init__(self, backbone: HfEngine, batch: int, clock: Clock) -> None:
        self._backbone = backbone
        self._batch = batch
        self._clock = clock
        self._equal: dict[Hashable, bool] = {}

    def locate(
        self, prompt: PromptObjects, sources: Sequence[ChunkSource], cost: TaskCost
    ) -> tuple[Location, ...]:
        """Every source, in order; errors of single chunks are in `Location.error`.

        Raises StoreError and StoreVersionError.
        """
        chunks = [self._look(prompt, source) for source in sources]
        missing = {facts.chunk_id: facts for facts in chunks if isinstance(facts, Facts)}
        errors: dict[str, str] = {}
        for shape, batch in self._batches(prompt, missing.values()):
            errors |= self._store(prompt, batch, shape, cost)
        return tuple(
            Location(source, chunk.chunk_id, chunk.length, True, errors.get(chunk.chunk_id))
            if isinstance(chunk, Facts)
            else chunk
            for source, chunk in zip(sources, chunks, strict=True)
        )

    def facts(self, source: ByContent, former: Former) -> Facts:
        """A chunk from its content, encoded. Raises UnreadableMedia and the errors of chunk building."""
        return _encode(self._built(source), former)

    def _look(self, prompt: PromptObjects, source: ChunkSource) -> Location | Facts:
        """A stored or unavailable chunk, or the facts of one to be formed."""
        try:
            if isinstance(source, ById):
                info = prompt.store.info(prompt.context, source.chunk_id)
                if info is None:
                    raise UnknownChunk(f"chunk {source.chunk_id[:12]} has left {prompt.store.url!r}")
                return Location(source, source.chunk_id, info.tokens)
            chunk = self._built(source)
            if prompt.has_canonical(chunk.id):
                return Location(source, chunk.id, chunk.num_tokens)
            facts = _encode(chunk, prompt.former)
            self._backbone.check_positions(prompt.former.alone(facts))
            return facts
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            return Location(source, error=str(error))

    def _built(self, source: ByContent) -> Chunk:
        try:
            return self._backbone.chunk([dict(item) for item in source.items])
        except KameraError:
            raise
        except ValueError as error:  # the processor's own error, for example for a picture too narrow
            raise UnreadableMedia(f"{source.key[:80]} was refused by the processor: {error}") from error

    def _batches(
        self, prompt: PromptObjects, missing: Iterable[Facts]
    ) -> Iterator[tuple[Hashable | None, list[Facts]]]:
        """Chunks that may share a forward, with the key of their trial; None for one that runs alone."""
        groups: dict[Hashable | None, list[Facts]] = {}
        for facts in missing:
            groups.setdefault(self._shape(prompt.former, facts), []).append(facts)
        for shape, group in groups.items():
            rows = self._rows(group[0])
            whole = 0 if shape is None else len(group) // rows
            if whole < WORTH and shape not in self._equal:
                whole = 0
            yield from ((shape, group[i * rows : (i + 1) * rows]) for i in range(whole))
            yield from ((None, [facts]) for facts in group[whole * rows :])

    def _shape(self, former: Former, facts: Facts) -> Hashable | None:
        rows = self._rows(facts)
        shape = self._backbone.batch_form(facts.encoded) if rows > 1 else None
        return None if shape is None else (former.anchor.length, rows, shape)

    def _rows(self, facts: Facts) -> int:
        """Number of chunks of this length that share a forward."""
        return min(self._batch, MOST_TOKENS // max(1, facts.length))

    def _store(
        self, prompt: PromptObjects, batch: Sequence[Facts], shape: Hashable | None, cost: TaskCost
    ) -> dict[str, str]:
        """Form and store the canonicals of a batch; returns errors by chunk id."""
        try:
            self._form(prompt.former, batch, shape, cost)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            if len(batch) == 1:
                return {batch[0].chunk_id: str(error)}
            each = [self._store(prompt, [facts], None, cost) for facts in batch]
            return {chunk_id: why for one in each for chunk_id, why in one.items()}
        errors: dict[str, str] = {}
        for facts in batch:
            try:
                cost.bytes += prompt.row_of(facts.chunk_id).bytes
            except KameraError as error:
                errors[facts.chunk_id] = str(error)
        return errors

    def _form(self, former: Former, batch: Sequence[Facts], shape: Hashable | None, cost: TaskCost) -> None:
        """As `_store`; the first batch of a ``shape`` (None: no trial) is tried in one forward, too."""
        places = [former.alone(facts) for facts in batch]
        with self._clock.adding(cost, "canonical_seconds"):
            if shape is not None and self._equal.get(shape):
                kvs = prefilled_together(former, batch, places)
                cost.batched += len(batch)
            else:
                kvs = [self._alone(former, f, p) for f, p in zip(batch, places, strict=True)]
            made = [Copy(kv, there) for kv, there in zip(kvs, places, strict=True)]
            pay([former.owed(facts, copy)[1] for facts, copy in zip(batch, made, strict=True)])
        if shape is None or shape in self._equal:
            return
        together = prefilled_together(former, batch, places)
        equal = self._equal[shape] = all(_same(a, b) for a, b in zip(kvs, together, strict=True))
        cost.trials += 1
        cost.trials_equal += equal
        if not equal:
            logger.info(
                "chunks of %d tokens run alone: %d in one forward differ", batch[0].length, len(batch)
            )

    def _alone(self, former: Former, facts: Facts, positions: torch.Tensor) -> KV:
        return self._backbone.run(facts.encoded, positions, self._backbone.cache([former.anchor.kv]))[0]


def _encode(chunk: Chunk, former: Former) -> Facts:
    return former.encodings.stored(chunk) or former.encodings.made(chunk)


def _same(one: KV, other: KV) -> bool:
    """Equal in every bit."""
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(one.parts, other.parts, strict=True)
        for name in a.keys() | b.keys()
    )
