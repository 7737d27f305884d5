"""A worker: one backbone and one store, which forms and stores one task at a time, in any process.

Results do not depend on earlier tasks: canonicals are formed behind the anchor alone, patches behind *exact*
antecedents. So the same objects are stored for any division of a plan into tasks and after any crash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from kamera.compile.canonicals import Canonicals
from kamera.compile.clock import Clock
from kamera.compile.locating import Locator, NotStored, not_stored
from kamera.compile.lookup import Lookup, context_of
from kamera.compile.ordering import Path
from kamera.compile.plan import Stored
from kamera.compile.reuse import time_serving
from kamera.compile.settings import Settings
from kamera.compile.tasks import About, Branch, Compiled, Cost, Found, Grown, Located, Sources
from kamera.content import common_prefix
from kamera.engines import Span
from kamera.engines.hf import Backbone, Observer
from kamera.errors import (
    CorruptChunk,
    KameraError,
    StoreError,
    StoreVersionError,
    UnknownChunk,
    WrongKey,
)
from kamera.patches import Before, Copy, Facts, Former, compact_positions, form_orbit, prefill_anchor
from kamera.store import ChunkStore, ObjectInfo

FLUSH_SECONDS = 60.0
"""Seconds a remote may take to store the objects of a task."""


@dataclass(eq=False)
class _Open:
    """The current window, all of it exact. Branches with a common prefix share its KV."""

    system: str | None
    former: Former
    chunks: list[Facts] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = self.former.backbone.live()

    @property
    def path(self) -> Path:
        """The ids of its chunks."""
        return tuple(chunk.chunk_id for chunk in self.chunks)

    def before(self, place: int) -> Before:
        """What stands before the chunk at ``place``, which was prefilled there."""
        still = (0,) * self.former.backbone.axes
        held = [self.former.anchor.kv, *(copy.kv for copy in self.copies[:place])]
        spans = tuple(Span(kv, None, still) for kv in held)
        return Before(spans, tuple(self.chunks[:place]), still, still)

    def keep(self, count: int) -> None:
        """Drop all but the first ``count`` chunks."""
        del self.chunks[count:], self.copies[count:]

    def grow(self, facts: Facts) -> Copy:
        """Append a chunk, prefilled in context; the leading one is its canonical, if that is exact."""
        former, path = self.former, self.path
        copy = None if path else former.leading(facts)
        if copy is None or copy.lossy:
            backbone = former.backbone
            place = compact_positions(backbone, former.anchor.input_ids, [*self.chunks, facts])[-1]
            before = [former.anchor.kv, *(held.kv for held in self.copies)]
            self.live.show([Span(kv, None, (0,) * backbone.axes) for kv in before], room=facts.length)
            kv = backbone.prefill(facts.encoded, place, self.live)
            copy = Copy(kv, place, None, "exact", path, canonical=False)
        self.chunks.append(facts)
        self.copies.append(copy)
        return copy


class Worker:
    """Runs tasks. Errors of single chunks are part of the result; StoreError and errors that are not a
    KameraError are raised.
    """

    def __init__(self, backbone: Backbone, store: ChunkStore, settings: Settings) -> None:
        self.backbone = backbone
        self.store = store
        self.settings = settings
        self.clock = Clock(backbone.device)
        self._locator = Locator(backbone, store, Canonicals(backbone, settings.batch, self.clock))
        self._lookups: dict[str | None, Lookup] = {}
        self._open: _Open | None = None
        self._broken: dict[tuple[str | None, Path], str] = {}

    def about(self, task: Sources) -> About:
        """Facts of the model and the clock that a job needs."""
        return About(len(self.backbone.layout), self.clock.name)

    def missing(self, task: Sources) -> list[str]:
        """The ids, among those that sources name, of chunks that are not stored."""
        lookup = self._lookup(task.system)
        ids = [source.chunk_id for source in task.sources if isinstance(source, Stored)]
        return [chunk_id for chunk_id in ids if not lookup.has_canonical(chunk_id)]

    def locate(self, task: Sources) -> Located:
        """Determine the id of each chunk, and form its canonical if that is not stored."""
        cost = Cost()
        with self._measured(task.system, cost):
            try:
                lookup = self._lookup(task.system)
            except KameraError as error:  # this model cannot have such a prompt
                return Located(tuple(Found(source, error=str(error)) for source in task.sources), cost)
            found = self._locator.locate(lookup, partial(self._former, task.system), task, cost)
        return Located(found, cost)

    def compile(self, branches: Sequence[Branch]) -> Compiled:
        """Form the patches of each branch that are not stored."""
        cost = Cost()
        with self._measured(branches[0].system, cost):
            grown = tuple(self._grow(branch, cost) for branch in branches)
        return Compiled(grown, cost)

    # -- patches -------------------------------------------------------------------------------

    def _grow(self, branch: Branch, cost: Cost) -> Grown:
        lookup = self._lookup(branch.system)
        patches: set[int] = set()
        orbits: set[int] = set()
        i = 1  # a leading chunk has no antecedents
        try:
            for i in range(1, len(branch.path)):
                chunk_id, before = branch.path[i], branch.path[:i]
                self._check_unbroken(branch, i)
                if i < branch.first:
                    continue
                wanted = i not in patches and not lookup.has_patch(chunk_id, before, branch.budgets[i])
                if wanted:
                    self._reach(lookup, branch, i, patches, cost)
                if i in branch.orbits and not lookup.has_orbit(chunk_id, before, branch.orbits[i]):
                    opened = self._reach(lookup, branch, i, patches, cost)
                    form_orbit(
                        opened.former.within(branch.orbits[i]),
                        opened.chunks[i],
                        opened.chunks[:i],
                        samples=self.settings.samples,
                        seed=self.settings.seed,
                    )
                    cost.bytes += self._kept(lookup, chunk_id, before, "orbit").bytes
                    orbits.add(i)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            self._broken[branch.system, branch.path[: i + 1]] = str(error)
            return Grown(frozenset(patches), frozenset(orbits), i, str(error))
        return Grown(frozenset(patches), frozenset(orbits))

    def _check_unbroken(self, branch: Branch, i: int) -> None:
        error = self._broken.get((branch.system, branch.path[: i + 1]))
        if error is not None:  # it failed in an earlier branch and would fail again
            raise KameraError(error)

    def _reach(self, lookup: Lookup, branch: Branch, i: int, formed: set[int], cost: Cost) -> _Open:
        """Extend the open window to the branch's chunk ``i``; adds patches formed on the way to ``formed``.

        The common prefix stays.
        """
        opened = self._opened(branch.system)
        same = common_prefix(opened.path, branch.path[: i + 1])
        opened.keep(same)
        for place in range(same, i + 1):
            facts = self._facts_of(lookup, opened.former, branch, place)
            prefill = Cost()
            with self.clock.adding(prefill, "context_seconds"):
                copy = opened.grow(facts)
            chunk_id, before, budget = branch.path[place], branch.path[:place], branch.budgets[place]
            if place and not lookup.has_patch(chunk_id, before, budget):
                cost.add(prefill)
                former = opened.former.within(budget)
                with self.clock.adding(cost, "forming_seconds"):
                    former.harvest(facts, copy, "exact", opened.before(place))
                formed.add(place)
                cost.bytes += self._kept(lookup, chunk_id, before, "exact").bytes
                time_serving(former, facts, copy, self.clock, cost)
        return opened

    def _kept(self, lookup: Lookup, chunk_id: str, before: Path, kind: str) -> ObjectInfo:
        """The row of a patch that was put. Raises NotStored if the store does not hold it."""
        info = self.store.info(lookup.context, chunk_id, before, kind)
        if info is None:
            raise NotStored(not_stored(chunk_id, self.store))
        return info

    def _facts_of(self, lookup: Lookup, former: Former, branch: Branch, place: int) -> Facts:
        """A chunk from its stored canonical; built again from its content if that is damaged or missing.

        Raises WrongKey for an object under a missing encryption key: it is not replaced, so a patch would
        have no canonical.
        """
        source = branch.sources[place]
        try:
            return former.known(branch.path[place])
        except WrongKey as error:
            lookup.refuse(error)
            raise
        except (CorruptChunk, UnknownChunk) as error:
            if isinstance(error, CorruptChunk):
                lookup.refuse(error)
            if isinstance(source, Stored):
                raise
            facts = self._locator.facts(source, former)
            former.canonical(facts)
            return facts

    # -- inside --------------------------------------------------------------------------------

    def _opened(self, system: str | None) -> _Open:
        if self._open is None or self._open.system != system:
            self._open = None  # let go of the old KV first
            anchor = prefill_anchor(self.backbone, system, self.store)
            self._open = _Open(
                system,
                Former(
                    self.backbone,
                    self.store,
                    anchor,
                    self.settings.budget,
                    tolerance=self.settings.tolerance,
                ),
            )
        return self._open

    def _former(self, system: str | None) -> Former:
        return self._opened(system).former

    def _lookup(self, system: str | None) -> Lookup:
        if system not in self._lookups:
            context = context_of(self.backbone, self.store, system)
            self._lookups[system] = Lookup(
                self.store, context, self.settings.samples, self.settings.tolerance is not None
            )
        return self._lookups[system]

    @contextmanager
    def _measured(self, system: str | None, cost: Cost) -> Iterator[None]:
        """Count and time the block, and check that its objects are stored."""
        started = self.clock.now()
        before = self._refused(system)
        backbone = self.backbone
        every, own = backbone.measure(probes=True), backbone.measure()
        with every as all_work, own as work, self._timing_the_decoder(cost):
            yield
        flushed = self.store.flush(FLUSH_SECONDS)
        if lost := (*flushed.unsaved, *flushed.dropped):
            raise StoreError(
                f"{self.store.url} has not stored {len(lost)} objects: run again, objects already stored are "
                "not formed again"
            )
        cost.forwards, cost.tokens = work.forwards, work.tokens
        cost.vision_encodes = work.vision_encodes
        cost.probe_forwards = all_work.forwards - work.forwards
        cost.probe_tokens = all_work.tokens - work.tokens
        cost.probe_encodes = all_work.vision_encodes - work.vision_encodes
        cost.refused += self._refused(system) - before
        cost.seconds = self.clock.now() - started

    def _refused(self, system: str | None) -> int:
        return self._lookups[system].refused if system in self._lookups else 0

    @contextmanager
    def _timing_the_decoder(self, cost: Cost) -> Iterator[None]:
        started = 0.0

        def begin(*_: object) -> None:
            nonlocal started
            started = self.clock.now()

        def end(*_: object) -> None:
            cost.decoder_seconds += self.clock.now() - started

        decoder = self.backbone.decoder
        hooks = [
            decoder.register_forward_pre_hook(Observer(begin)),
            decoder.register_forward_hook(Observer(end)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
