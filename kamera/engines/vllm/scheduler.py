"""What the connector keeps between the scheduler's calls: requests with recipes, and what is to be loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kamera.engines.recipe import Part, Recipe, RowKey
from kamera.engines.recognise import Placeholder, with_rest
from kamera.engines.vllm.counts import Counts, origins
from kamera.engines.vllm.harvest import HarvestChunk, part_names
from kamera.engines.vllm.identity import EngineIdentity
from kamera.engines.vllm.known import KnownPrompts
from kamera.engines.vllm.positions import Positions
from kamera.engines.vllm.prompts import PromptTables
from kamera.engines.vllm.serving import PageLoad, StoredRows, check_places, recipe_of, salt
from kamera.engines.vllm.stores import Stores
from kamera.errors import KameraError
from kamera.ops import chunk_id, ids_digest
from kamera.store import Context, is_key
from kamera.trust import prefilled_behind, weakest

logger = logging.getLogger(__name__)

_MOST = 4096
"""Chunks remembered as about to be stored, at most, before those are forgotten of which the time is over."""

_PATIENCE = 1.0
"""Seconds that a prompt waits, at most, for what workers are about to store of the prompts before it."""


@dataclass
class _Request:
    """A request with a recipe, in the engine; its first ``local`` tokens stand in pages already.

    ``positions`` ``[axes, tokens]`` are those of its prompt. A ``recognised`` one came without a recipe: its
    rows are known. One that is not ``supplied`` is harvested alone.
    """

    request: Any
    recipe: Recipe
    positions: torch.Tensor
    recognised: bool = False
    supplied: bool = True
    is_harvested: bool = False
    local: int = 0
    load: PageLoad | None = None
    has_failed: bool = False


@dataclass
class SchedulerSide:
    """Decides for each request how many leading tokens are supplied; reads rows alone. One thread uses it.

    ``opener`` is the token that opens turns: at it prompts without a recipe are cut.
    """

    stores: Stores
    identity: EngineIdentity
    positions: Positions
    harvests: bool = True
    tables: PromptTables | None = None
    opener: int | None = None
    rows: StoredRows = field(init=False)
    counts: Counts = field(default_factory=Counts)
    encodes: int = 0

    def __post_init__(self) -> None:
        self.rows = StoredRows(self.stores)
        self._requests: dict[str, _Request] = {}
        self._fingerprints: dict[str, str] = {}
        self._loads: list[PageLoad] = []
        # what workers are to store, by tenant and chunk, and until when it may be waited for
        self._coming: dict[tuple[str, str], tuple[RowKey, float]] = {}
        # requests that wait for it: rows that were known when they were last looked at, and the end of that
        self._waiting: dict[str, tuple[int, float]] = {}

    def arrive(self, request: Any, local: int = 0) -> None:
        """A new request: read its recipe, and salt its prefix by what is to be supplied.

        A recipe that does not fit is refused with a line in the log, and the request is computed. A request
        without one may be recognised; its first ``local`` tokens stand in vLLM's own prefix cache.
        """
        reason = "adapter"
        try:
            fingerprint, reason = self.identity.of(request), "recipe"
            ids = request.prompt_token_ids or ()
            recipe = recipe_of(request.kv_transfer_params, ids, request.cache_salt or "", fingerprint)
            if recipe is None:
                self._note_plain_request(request, fingerprint, local)
                return
            reason = "place"
            self._admit(request, recipe)
        except (KameraError, ValueError) as error:
            self.counts.add("refused_requests", reason)
            logger.warning("the recipe of request %s is not used: %s", request.request_id, error)

    def match(self, request: Any, computed: int) -> int | None:
        """How many tokens behind the first ``computed`` are supplied; None: ask again."""
        if request.request_id in self._fingerprints:
            if not self._decide(request, computed):
                return None
            late_entry = self._requests.get(request.request_id)
            if late_entry is not None and late_entry.recipe.salt != late_entry.recipe.context.tenant:
                return None  # it is salted: what stands in pages is looked up anew
        entry = self._requests.get(request.request_id)
        if entry is None or entry.has_failed:
            return 0
        recipe = entry.recipe.leading
        count = len(recipe.parts) if entry.recognised else self.rows.count_stored(request.request_id, recipe)
        if count is None:
            return None
        entry.local = computed
        if count < 0 or not entry.supplied:
            return 0
        stop = min(recipe.borders[count], request.num_prompt_tokens - 1)  # one is computed, for its logits
        return max(0, stop - computed)

    def begin_load(self, request: Any, block_ids: Collection[int], tokens: int) -> None:
        """Pages are there for a request of which ``tokens`` are supplied."""
        entry = self._requests.get(request.request_id)
        if entry is None or not tokens:
            return
        stop = entry.local + tokens
        entry.load = PageLoad(request.request_id, entry.recipe, tuple(block_ids), entry.local, stop)
        self._loads.append(entry.load)

    def take_loads(self) -> tuple[PageLoad, ...]:
        """What the workers load in this step."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def take_harvests(self, scheduled: Mapping[str, int], pages: Any) -> tuple[HarvestChunk, ...]:
        """What is read back after this step, in which ``scheduled`` tokens of requests are computed.

        ``pages`` is vLLM's cache manager. A request of which a load failed leaves nothing: which of its
        pages were shared with others is not known here.
        """
        chunks = list[HarvestChunk]()
        for request_id, tokens in scheduled.items():
            entry = self._requests.get(request_id)
            if entry is None or entry.is_harvested or entry.has_failed or not self.harvests:
                continue
            if entry.request.num_computed_tokens + tokens >= len(entry.recipe.ids):
                entry.is_harvested = True
                (block_ids,) = pages.get_block_ids(request_id)
                harvested = _harvestable_chunks(entry, tuple(block_ids))
                chunks += harvested
                if entry.recognised:
                    self._expect([chunk.row for chunk in harvested])
        return tuple(chunks)

    def count_loaded(self, request_ids: Collection[str]) -> None:
        """Workers have loaded for these requests."""
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None and entry.load is not None:
                for origin, tokens in origins(entry.recipe, entry.load.start, entry.load.stop):
                    self.counts.add("supplied_tokens", origin, tokens)

    def fail_loads(self, request_ids: Collection[str]) -> None:
        """Workers could not load for these requests: they are computed, and their rows looked up anew."""
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None:
                entry.has_failed = True
                self.counts.add("refused_requests", "load")
                self.rows.forget(entry.recipe)
                if entry.recognised and self.tables is not None:
                    self.tables.forget(entry.recipe.context)

    def leave(self, request_id: str) -> None:
        """A request is over."""
        self._requests.pop(request_id, None)
        self._fingerprints.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self.rows.drop(request_id)

    # -- inside --------------------------------------------------------------------------------

    def _admit(self, request: Any, recipe: Recipe) -> None:
        """Supply a request, apart from all that are supplied otherwise. Raises as `check_places`."""
        self._enter(_Request(request, recipe, self.positions.of(request)))

    def _enter(self, entry: _Request) -> None:
        request, recipe = entry.request, entry.recipe
        check_places(recipe, entry.positions)
        self._requests[request.request_id] = entry
        if recipe.salt != recipe.context.tenant:
            salt(request, recipe.salt)

    def _note_plain_request(self, request: Any, fingerprint: str, local: int) -> None:
        """A request without a recipe: one whose prompt is to be computed for its own sake is left alone."""
        if self.tables is None or request.skip_reading_prefix_cache or request.resumable:
            return
        self._fingerprints[request.request_id] = fingerprint
        self._decide(request, local)

    def _decide(self, request: Any, local: int) -> bool:
        """Recognise a prompt of which ``local`` tokens stand in pages; False while its store is read.

        Or written: what the prompt before it left may be about to be stored.
        """
        assert self.tables is not None
        table, name = self.tables.of(request.cache_salt or ""), request.request_id
        now = time.monotonic()
        rows, until = self._waiting.get(name, (-1, now + _PATIENCE))
        if table is None or (table.rows == rows and now < until):
            return False
        try:
            ids = np.array(request.prompt_token_ids or (), dtype="<i8")
            entry = self._recognise(request, self._fingerprints[name], ids, table, local)
            if entry is not None and now < until and self._is_coming(entry.recipe, table, local):
                self._waiting[name] = table.rows, until
                return False
            if entry is not None:
                self._enter(entry)
        except (KameraError, ValueError) as error:
            logger.warning("request %s is not served: %s", name, error)
        del self._fingerprints[name]
        return True

    def _recognise(
        self, request: Any, fingerprint: str, ids: np.ndarray, table: KnownPrompts, local: int
    ) -> _Request | None:
        """What is stored of a prompt, if that is more than vLLM has, and the rest of it, to be harvested."""
        assert self.tables is not None
        pictures, tenant = _pictures(request), request.cache_salt or ""
        recipe = table.recipe(fingerprint, ids, pictures, self.tables.least)
        supplied = recipe is not None and recipe.borders[-1] - local >= self.tables.block
        if recipe is None or not (supplied or recipe.salt == tenant):
            own = Context(fingerprint, ids_digest(ids[:1]), tenant)
            recipe = Recipe(own, None, tuple(ids[:1].tolist()), ())
        if self.harvests and len(ids) > 1 and self.stores.of(tenant).kv == "as-is":
            positions = self.positions.of(request)
            stop = min([picture.start for picture in pictures], default=len(ids) - 1)
            recipe = with_rest(recipe, ids, self.opener, stop, len(positions))
        elif not supplied:
            return None
        return _Request(request, recipe, self.positions.of(request), True, supplied)

    def _expect(self, rows: Sequence[RowKey]) -> None:
        """Workers are about to store these."""
        now = time.monotonic()
        if len(self._coming) > _MOST:
            self._coming = {name: one for name, one in self._coming.items() if one[1] > now}
        self._coming |= {(row.context.tenant, row.chunk_id): (row, now + _PATIENCE) for row in rows}

    def _is_coming(self, recipe: Recipe, table: KnownPrompts, local: int) -> bool:
        """True if the first chunk that is neither stored nor in pages is about to be stored."""
        part = next((part for part in recipe.parts if part.missing), None)
        if part is None or part.stop <= local:
            return False
        row, until = self._coming.get((recipe.context.tenant, part.chunk_id), (None, 0.0))
        return row is not None and time.monotonic() < until and not table.knows(row)


def _harvestable_chunks(entry: _Request, pages: tuple[int, ...]) -> list[HarvestChunk]:
    """The chunks of a request in ``pages`` that vLLM computed, if they are what their ids say."""
    recipe, stop = entry.recipe, entry.local if entry.load is None else entry.load.stop
    count = sum(part.stop <= stop for part in recipe.leading.parts)
    names, chunks = part_names(recipe, count), list[HarvestChunk]()
    own, length, positions = recipe.context, len(recipe.anchor_ids), entry.positions
    if stop < length or recipe.anchor is None:
        row = RowKey.of(own, "anchor", own.anchor)
        chunks.append(HarvestChunk(row, recipe.anchor_ids, 0, positions[:, :length], pages))
    for i, part in enumerate(recipe.parts[count:], count):
        # what stands in pages already was computed there behind the same parts, but for what was supplied
        was_supplied = part.start < stop and part.kv is not None
        if was_supplied or (inputs := _inputs(entry.request, recipe, part)) is None:
            continue
        worths = [p.guarantee for p in recipe.parts[:count]]
        guarantee = weakest([*worths, *([prefilled_behind(weakest(worths))] if i > count else [])])
        row = RowKey.of(own, "exact" if i else "canonical", part.chunk_id, names[:i], "", guarantee)
        places = positions[:, part.start : part.stop]
        chunks.append(HarvestChunk(row, part.ids, part.start, places, pages, *inputs))
    return chunks


def _inputs(
    request: Any, recipe: Recipe, part: Part
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]] | None:
    """The small inputs of a chunk: its pictures' grids, and their names. None unless it is what its id says.

    The id of a text is a digest of its tokens. Of a chunk with pictures its request is believed, within its
    tenant: they all bear its id (`multi_modal_uuids`), or names that become an alias, but no other chunk's.
    """
    grids, kinds = [], torch.zeros(part.length, dtype=torch.int64)
    media = []
    for feature in request.mm_features:
        first = feature.mm_position.offset
        if first + feature.mm_position.length <= part.start or first >= part.stop:
            continue
        grid = None if feature.data is None else feature.data.get("image_grid_thw")
        if grid is None:
            return None
        media.append(picture_name(feature.identifier))
        grids.append(grid.data.view(1, 3))
        kinds[first - part.start : first - part.start + feature.mm_position.length] = 1
    if not grids:
        own = chunk_id(torch.tensor(part.ids, dtype=torch.int64), {})
        return ({}, ()) if own == part.chunk_id else None
    if set(media) & {other.chunk_id for other in recipe.parts} - {part.chunk_id}:
        return None
    return {"image_grid_thw": torch.cat(grids), "mm_token_type_ids": kinds}, tuple(media)


def _pictures(request: Any) -> list[Placeholder]:
    """The pictures of a prompt, in order."""
    pairs = [(feature.mm_position, feature.identifier) for feature in request.mm_features]
    return sorted(Placeholder(at.offset, at.length, picture_name(identifier)) for at, identifier in pairs)


def picture_name(identifier: str) -> str:
    """The engine's name of a picture; of several pictures under one chunk's id (`ID/1`) the id."""
    chunk, _, number = identifier.partition("/")
    return chunk if is_key(chunk) and number.isdigit() else identifier
