"""Who forms and stores: one backbone and one store, given a task at a time, in this process or another.

Nothing here depends on which worker did what before: canonicals are formed behind the anchor alone,
patches behind *exact* antecedents. So however a plan is cut into tasks, and whoever dies on the way, the
same objects are stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kamera.backbones import Backbone, Chunk
from kamera.backbones.backbone import ModelCache
from kamera.compile.lookup import Lookup, context_of
from kamera.compile.ordering import Path, common
from kamera.compile.plan import ChunkSource, Described, Stored
from kamera.compile.settings import Settings
from kamera.compile.tasks import Branch, Compiled, Cost, Found, Grown, Located, Sources
from kamera.errors import (
    CorruptChunk,
    KameraError,
    StoreError,
    StoreVersionError,
    UnknownChunk,
    UnreadableMedia,
)
from kamera.store import ChunkStore
from kamera.window import ReusePolicy
from kamera.window.anchor import prefill_anchor
from kamera.window.orbit import form_orbit
from kamera.window.report import Tally
from kamera.window.serving import Server
from kamera.window.slots import Facts, Resident
from kamera.window.state import compact_positions


class NotStored(KameraError):
    """What was archived is not in the store afterwards."""


@dataclass(eq=False)
class _Open:
    """The window at hand: what stands in it, all exact, and its live cache while that is still whole."""

    system: str | None
    server: Server
    residents: list[Resident] = field(default_factory=list)
    cache: ModelCache | None = None


class Worker:
    """Does tasks. Errors of a chunk's own are part of the result; StoreError and what is no
    KameraError are raised.
    """

    def __init__(self, backbone: Backbone, store: ChunkStore, settings: Settings) -> None:
        self.backbone = backbone
        self.store = store
        self.settings = settings
        self._lookups: dict[str | None, Lookup] = {}
        self._open: _Open | None = None
        self._broken: dict[tuple[str | None, Path], str] = {}

    def missing(self, task: Sources) -> list[str]:
        """Which of the chunks given by id are not stored."""
        lookup = self._lookup(task.system)
        ids = [source.chunk_id for source in task.sources if isinstance(source, Stored)]
        return [chunk_id for chunk_id in ids if not lookup.has_canonical(chunk_id)]

    def locate(self, task: Sources) -> Located:
        """Know each chunk by its id, and form its canonical where that is not stored."""
        cost = Cost()
        with self._measured(cost):
            try:
                lookup = self._lookup(task.system)
            except KameraError as error:  # no such prompt for this model
                return Located(tuple(Found(source, error=str(error)) for source in task.sources), cost)
            stored = any(isinstance(source, Stored) for source in task.sources)
            tokens = {i.chunk_id: i.tokens for i in self.store.chunks(lookup.context)} if stored else {}
            found = tuple(self._located(lookup, task.system, source, tokens) for source in task.sources)
        return Located(found, cost)

    def compile(self, branches: Sequence[Branch]) -> Compiled:
        """Form the patches of each branch that are not stored."""
        cost = Cost()
        with self._measured(cost):
            grown = tuple(self._grow(branch) for branch in branches)
        return Compiled(grown, cost)

    # -- canonicals ----------------------------------------------------------------------------

    def _located(
        self, lookup: Lookup, system: str | None, source: ChunkSource, stored: dict[str, int]
    ) -> Found:
        try:
            if isinstance(source, Stored):
                if source.chunk_id not in stored:
                    raise UnknownChunk(f"chunk {source.chunk_id[:12]} has left {self.store.url!r}")
                return Found(source, source.chunk_id, stored[source.chunk_id])
            chunk = self._build(source)
            formed = not lookup.has_canonical(chunk.id)
            if formed:
                self._server(system).canonical(self._facts(chunk))
                if not lookup.has_canonical(chunk.id):
                    raise NotStored(_not_stored(chunk.id, self.store))
            return Found(source, chunk.id, chunk.num_tokens, formed)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            return Found(source, error=str(error))

    def _build(self, source: Described) -> Chunk:
        try:
            return self.backbone.chunk([dict(item) for item in source.items])
        except KameraError:
            raise
        except ValueError as error:  # a processor's own refusal: a picture too narrow, say
            raise UnreadableMedia(f"{source.key[:80]} was refused by the processor: {error}") from error

    def _facts(self, chunk: Chunk) -> Facts:
        return Facts(chunk.id, self.backbone.encode(chunk), chunk.label)

    # -- patches -------------------------------------------------------------------------------

    def _grow(self, branch: Branch) -> Grown:
        lookup = self._lookup(branch.system)
        patches: set[int] = set()
        orbits: set[int] = set()
        i = 1  # a leading chunk absorbs nothing
        try:
            for i in range(1, len(branch.path)):
                chunk_id, before = branch.path[i], branch.path[:i]
                self._check_unbroken(branch, i)
                if i < branch.first:
                    continue
                wanted = i not in patches and not lookup.has_patch(chunk_id, before)
                if wanted:
                    self._reach(lookup, branch, i, patches)
                if i in branch.orbits and not lookup.has_orbit(chunk_id, before):
                    opened = self._reach(lookup, branch, i, patches)
                    facts = [r.facts for r in opened.residents]
                    settings = self.settings
                    form_orbit(
                        opened.server, facts[i], facts[:i], samples=settings.samples, seed=settings.seed
                    )
                    orbits.add(i)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            self._broken[branch.system, branch.path[: i + 1]] = str(error)
            return Grown(frozenset(patches), frozenset(orbits), i, str(error))
        return Grown(frozenset(patches), frozenset(orbits))

    def _check_unbroken(self, branch: Branch, i: int) -> None:
        error = self._broken.get((branch.system, branch.path[: i + 1]))
        if error is not None:  # it failed in a branch before this one, and would again
            raise KameraError(error)

    def _reach(self, lookup: Lookup, branch: Branch, i: int, formed: set[int]) -> _Open:
        """Make the open window hold the branch up to chunk ``i``; patches formed on the way are noted.

        What it has in common with what stands there stays.
        """
        opened = self._opened(branch.system)
        held = [r.facts.chunk_id for r in opened.residents]
        same = common(held, branch.path[: i + 1])
        if same < len(held):
            del opened.residents[same:]
            opened.cache = None
        for place in range(same, i + 1):
            self._append(opened, self._facts_of(opened.server, branch, place))
            if place and not lookup.has_patch(branch.path[place], branch.path[:place]):
                arrived = opened.residents[place]
                opened.server.harvest(arrived.facts, arrived.copy, arrived.formed)
                formed.add(place)
                if not self.store.has_patch(lookup.context, branch.path[place], branch.path[:place]):
                    raise NotStored(_not_stored(branch.path[place], self.store))
        return opened

    def _append(self, opened: _Open, facts: Facts) -> None:
        """One more chunk at the tail, exact; the live cache grows with it."""
        server, residents = opened.server, opened.residents
        chunks = [*(r.facts for r in residents), facts]
        positions = compact_positions(self.backbone, server.anchor.input_ids, chunks)[-1]
        if not residents:
            residents.append(server.bring(facts, (), positions, Tally()))
            return
        cache, opened.cache = opened.cache, None
        if cache is None:
            cache = self.backbone.cache([server.anchor.kv, *(r.live for r in residents)])
        residents.append(server.prefill(facts, residents, positions, cache))
        opened.cache = cache

    def _facts_of(self, server: Server, branch: Branch, place: int) -> Facts:
        """A chunk from its archive; made again from its content where that is damaged or gone."""
        source = branch.sources[place]
        try:
            return server.known(branch.path[place])
        except (CorruptChunk, UnknownChunk):
            if isinstance(source, Stored):
                raise
            facts = self._facts(self._build(source))
            server.canonical(facts)
            return facts

    # -- inside --------------------------------------------------------------------------------

    def _server(self, system: str | None) -> Server:
        return self._opened(system).server

    def _opened(self, system: str | None) -> _Open:
        if self._open is None or self._open.system != system:
            self._open = None  # let go of the old KV first
            policy = ReusePolicy(
                minimum="exact",
                on_miss="form",
                rank=self.settings.rank,
                patch_bytes=self.settings.patch_bytes,
            )
            anchor = prefill_anchor(self.backbone, system)
            self._open = _Open(system, Server(self.backbone, self.store, anchor, policy))
        return self._open

    def _lookup(self, system: str | None) -> Lookup:
        if system not in self._lookups:
            context = context_of(self.backbone, self.store, system)
            self._lookups[system] = Lookup(self.store, context, self.settings.budget, self.settings.samples)
        return self._lookups[system]

    @contextmanager
    def _measured(self, cost: Cost) -> Iterator[None]:
        started = time.perf_counter()
        with self.backbone.measure() as work, self._timing_the_decoder(cost):
            yield
        cost.forwards, cost.tokens = work.forwards, work.tokens
        cost.vision_encodes = work.vision_encodes
        cost.seconds = time.perf_counter() - started

    @contextmanager
    def _timing_the_decoder(self, cost: Cost) -> Iterator[None]:
        started = 0.0

        def now() -> float:
            if self.backbone.device.type == "cuda":
                torch.cuda.synchronize(self.backbone.device)  # a kernel is launched, not waited for
            return time.perf_counter()

        def begin(*_: object) -> None:
            nonlocal started
            started = now()

        def end(*_: object) -> None:
            cost.decoder_seconds += now() - started

        decoder = self.backbone.decoder
        hooks = [decoder.register_forward_pre_hook(begin), decoder.register_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _not_stored(chunk_id: str, store: ChunkStore) -> str:
    return (
        f"chunk {chunk_id[:12]} was prefilled but {store!r} does not hold what came of it: a memory store "
        "let go of it; give the store more room"
    )
