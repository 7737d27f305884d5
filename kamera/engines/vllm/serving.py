"""The scheduler's side: what of a prompt stored objects can make. Rows alone: no tensor is read.

A request brings its recipe in ``kv_transfer_params["kamera"]``. Its parts are supplied from the first token
on, up to the first one that has to be computed; vLLM computes the rest, and reads back what it computed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from kamera.engines.recipe import Recipe
from kamera.engines.vllm.stores import Stores
from kamera.errors import IncompatibleChunk, KameraError
from kamera.store import stored_keys

logger = logging.getLogger(__name__)

FIELD = "kamera"
"""The name of the recipe in a request's ``kv_transfer_params``."""

_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class PageLoad:
    """Tokens ``start`` up to ``stop`` of a request's prompt, to be written into its pages."""

    request_id: str
    recipe: Recipe
    block_ids: tuple[int, ...]
    start: int
    stop: int


def recipe_of(
    params: Mapping[str, Any] | None, ids: Sequence[int], tenant: str, fingerprint: str
) -> Recipe | None:
    """The recipe of a request, if it has one and it is of these token ids, this tenant and this model.

    Raises KameraError that names what does not fit, ValueError for what is no recipe.
    """
    text = (params or {}).get(FIELD)
    if text is None:
        return None
    recipe = Recipe.from_json(text)
    recipe.check(replace(recipe.context, fingerprint=fingerprint, tenant=tenant))
    if tuple(ids[: len(recipe.ids)]) != recipe.ids:
        raise IncompatibleChunk("a recipe of other token ids than the prompt's: send the ids of the recipe")
    return recipe


def check_places(recipe: Recipe, positions: torch.Tensor) -> None:
    """Raise IncompatibleChunk unless the leading parts stand where the engine counts their tokens.

    ``positions`` ``[axes, tokens]`` are the engine's own of the prompt.
    """
    for part in recipe.leading.parts:
        low = tuple(positions[:, part.start : part.stop].amin(1).tolist())
        if low != part.position:
            raise IncompatibleChunk(
                f"chunk {part.chunk_id[:12]} stands at {low} for this engine, the recipe says {part.position}"
            )


class SaltedBlocks:
    """Salted hashes of a request's blocks. They are made from vLLM's own hashes, and replace them.

    vLLM hashes a prompt before a connector sees it. A new ``cache_salt`` would have it hash the whole prompt
    again.
    """

    def __init__(self, hasher: Callable[[Any], list[bytes]], salt: str) -> None:
        self._hasher, self._salt = hasher, salt.encode()
        self._plain: list[bytes] = []

    def __call__(self, request: Any) -> list[bytes]:
        """The hashes of blocks that have become full, as `Request.update_block_hashes` asks for them."""
        hashes, request.block_hashes = request.block_hashes, self._plain
        try:
            return self.salt_hashes(self._hasher(request))
        finally:
            request.block_hashes = hashes

    def salt_hashes(self, hashes: Sequence[bytes]) -> list[bytes]:
        """vLLM's next ``hashes``, salted."""
        self._plain += hashes
        return [hashlib.blake2b(h, key=self._salt, digest_size=len(h)).digest() for h in hashes]


def salt(request: Any, text: str) -> None:
    """Keep the pages of a request apart from all requests but those that are salted with the same text."""
    if request._block_hasher is not None:  # else there is no prefix cache
        request._block_hasher = blocks = SaltedBlocks(request._block_hasher, text)
        request.block_hashes[:] = blocks.salt_hashes(request.block_hashes)


class StoredRows:
    """Which objects of recipes are stored, of all tenants. Safe to use from several threads.

    A row that was seen is taken to be there until a worker misses it (`forget`). A remote is asked aside.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._stored_keys = set[str]()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="kamera-rows") if stores.remote else None
        self._futures: dict[str, Future[int]] = {}
        self._lock = threading.Lock()

    def count_stored(self, request_id: str, recipe: Recipe) -> int | None:
        """Of how many leading parts of ``recipe`` all objects are stored, -1 without the anchor's.

        None while a remote has not answered yet.
        """
        if self._pool is None:
            return self._count(recipe)
        future = self._futures.get(request_id)
        if future is None:
            future = self._futures[request_id] = self._pool.submit(self._count, recipe)
        if not future.done():
            return None
        del self._futures[request_id]
        return future.result()

    def forget(self, recipe: Recipe) -> None:
        """Look the objects of a recipe up anew: a worker did not find one of them as its row said."""
        with self._lock:
            for row in (recipe.anchor, *(row for part in recipe.parts for row in (part.kv, part.patch))):
                if row is not None:
                    self._stored_keys.discard(row.key)

    def drop(self, request_id: str) -> None:
        """A request is over."""
        self._futures.pop(request_id, None)

    def _count(self, recipe: Recipe) -> int:
        each = [(recipe.anchor,), *((part.kv, part.patch) for part in recipe.leading.parts)]
        keys = [[row.key for row in rows if row is not None] for rows in each]
        if not keys[0]:
            return -1
        with self._lock:
            new_keys = {*chain.from_iterable(keys)} - self._stored_keys
        try:
            present_keys = (
                stored_keys(self._stores.of(recipe.context.tenant), new_keys) if new_keys else set()
            )
        except KameraError as error:
            logger.warning("stored rows were not looked up: %s", error)
            return -1
        with self._lock:
            if len(self._stored_keys) > _REMEMBERED:
                self._stored_keys.clear()  # they are looked up again
            self._stored_keys |= present_keys
        missing_keys = new_keys - present_keys
        return next((i for i, names in enumerate(keys) if not missing_keys.isdisjoint(names)), len(keys)) - 1
