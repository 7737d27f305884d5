"""Run a plan: form and store the missing objects of each line's window.

First every chunk's canonical, then the patches, window by window in the order of a trie over antecedents
(`kamera.compile.plan`), so that common antecedents are prefilled once for any order of the plan's lines.
Canonicals are formed behind the anchor alone, patches behind *exact* antecedents, so the result does not
depend on the store's earlier contents, on interruptions, or on a division of the plan among processes. The
store is the record of progress: a job that was killed is run again and continues.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from kamera.compile.plan import ByContent, ById, ChunkIds, ChunkSource, PlanFile, PlannedWindow
from kamera.compile.report import Branch, CompileReport, Location, Progress, Settings, System
from kamera.content import Chunk, Encoded, common_prefix
from kamera.engines import Account
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import (
    CorruptChunk,
    KameraError,
    PlanError,
    StoreError,
    StoreVersionError,
    UnknownChunk,
    UnreadableMedia,
    WrongKey,
)
from kamera.ops import PatchBudget, tensor_digest
from kamera.patches import (
    Former,
    Line,
    form_orbit,
    harvest,
    ordering_count,
    prefill_anchor,
    put_owed,
    stored_patch,
)
from kamera.store import ChunkStore, Context, ObjectInfo

logger = logging.getLogger(__name__)


class NotStored(KameraError):
    """An archived object is not in the store afterwards."""


def context_of(backbone: HfEngine, store: ChunkStore, system: str | None) -> Context:
    """The context of a window under ``system``; its anchor is tokenised, not prefilled."""
    ids = backbone.builder.anchor_ids(system)
    return Context(backbone.fingerprint, tensor_digest(ids), store.tenant, store.kv)


class PromptObjects:
    """Objects of one context. Look-ups go by ids alone, without a forward; a suitable patch is also verified.

    The anchor is prefilled with the first use of ``former`` or ``line``. ``refusals`` counts stored objects
    that were not accepted, ``bytes`` are those of the objects that were formed.
    """

    def __init__(self, backbone: HfEngine, store: ChunkStore, system: str | None, settings: Settings) -> None:
        self.backbone = backbone
        self.store = store
        self.system = system
        self.settings = settings
        self.refusals = self.bytes = 0

    @cached_property
    def context(self) -> Context:
        """Raises the KameraError of a model that cannot have such a prompt."""
        return context_of(self.backbone, self.store, self.system)

    @cached_property
    def former(self) -> Former:
        """Reads and forms the objects."""
        anchor = prefill_anchor(self.backbone, self.system, self.store)
        settings = self.settings
        return Former(self.backbone, self.store, anchor, settings.budget, max_error=settings.max_error)

    @cached_property
    def line(self) -> Line:
        """The window that was walked to last, all of it exact."""
        return Line(self.former)

    def locate(self, source: ChunkSource) -> Location:
        """The id of a chunk, and its canonical formed if it is not stored; its own errors are in the result.

        Raises StoreError and StoreVersionError.
        """
        try:
            if isinstance(source, ById):
                info = self.store.info(self.context, source.chunk_id)
                if info is None:
                    raise UnknownChunk(f"chunk {source.chunk_id[:12]} has left {self.store.url!r}")
                return Location(source.chunk_id, info.tokens)
            chunk = self._build(source)
            if self.has_canonical(chunk.id):
                return Location(chunk.id, chunk.num_tokens)
            put_owed(self.former.canonical_and_owed(self._encode(chunk))[1])
            self._count(chunk.id)
            return Location(chunk.id, chunk.num_tokens, formed=True)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            return Location(error=str(error))

    def grow(self, branch: Branch) -> None:
        """Form the patches of a branch that are not stored, and note on its nodes what came of each.

        Raises StoreError and StoreVersionError; any other KameraError is the failure of a node.
        """
        nodes = branch.nodes
        end = 1  # a leading chunk has no antecedents
        try:
            for end in range(1, len(nodes)):
                if nodes[end].failure:  # in an earlier branch: it would fail again
                    break
                if end >= branch.first:
                    self._complete(branch, end)
            else:
                end = len(nodes)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            nodes[end].failure = str(error)
        for i, node in enumerate(nodes[branch.first :], branch.first):
            node.outcome = node.outcome or ("reused" if i < end else "skipped")

    def has_canonical(self, chunk_id: str) -> bool:
        """True if the chunk's canonical is stored."""
        return self.store.has(self.context, chunk_id)

    def has_patch(self, path: ChunkIds, budget: PatchBudget, kind: str = "exact") -> bool:
        """True if the patch of a node is stored, of at least the budget.

        It was formed behind exact antecedents, and leaves out no more than the settings allow; an
        ``"orbit"`` patch is the mean over enough orderings. Raises WrongKey for one under a missing key.
        """
        # the row decides if it is suitable; a suitable one is read once, because it may be damaged
        *antecedents, chunk_id = path
        try:
            row = self.store.info(self.context, chunk_id, antecedents, kind)
            if row is None or not self._suits(row, budget):
                return False
            return self.store.get_patch(self.context, chunk_id, antecedents, kind) is not None
        except CorruptChunk as error:  # quarantined by the read, and formed again
            self._refuse(error)
            return False
        except WrongKey as error:  # readable by its owner, so it is not replaced
            self._refuse(error)
            raise

    def _complete(self, branch: Branch, i: int) -> None:
        """Form what is wanted of a branch's node ``i`` and is not stored."""
        node, path = branch.nodes[i], branch.path[: i + 1]
        if not self.has_patch(path, node.budget):
            self._walk(branch, i)
        if node.owner is not node or node.orbit_budget is None:
            return
        if not self.has_patch(path, node.orbit_budget, "orbit"):
            *antecedents, encoded = self._walk(branch, i)
            former, settings = self.former.with_budget(node.orbit_budget), self.settings
            form_orbit(former, encoded, antecedents, samples=settings.samples, seed=settings.seed)
            self._count(encoded.chunk_id, path[:-1], "orbit")
            node.orbit_formed = True

    def _walk(self, branch: Branch, i: int) -> Sequence[Encoded]:
        """Walk the line to the branch's node ``i``, and form the patches that lack on the way.

        What it has in common with the line stays. Returns the chunks of the line.
        """
        line = self.line
        chunks = line.chunks
        same = common_prefix([chunk.chunk_id for chunk in chunks], branch.path[: i + 1])
        line.arrange(chunks[:same])
        for place in range(same, i + 1):
            node, path = branch.nodes[place], branch.path[: place + 1]
            encoded, antecedents = self._encoded_at(branch, place), line.before
            span = line.append(encoded)
            if place and not self.has_patch(path, node.budget):
                harvest(self.former.with_budget(node.budget), encoded, span, antecedents)
                node.outcome = "formed"
                self._count(encoded.chunk_id, antecedents.names, "exact")
        return line.chunks

    def _encoded_at(self, branch: Branch, place: int) -> Encoded:
        """A chunk from its stored canonical; built again from its content if that is damaged or missing.

        Raises WrongKey for an object under a missing encryption key: it is not replaced, so a patch would
        have no canonical.
        """
        source = branch.nodes[place].source
        try:
            return self.former.encoded_of(branch.path[place])
        except WrongKey as error:
            self._refuse(error)
            raise
        except (CorruptChunk, UnknownChunk) as error:
            if isinstance(error, CorruptChunk):
                self._refuse(error)
            if isinstance(source, ById):
                raise
            encoded = self._encode(self._build(source))
            self.former.canonical(encoded)
            return encoded

    def _count(self, chunk_id: str, antecedents: ChunkIds | None = None, kind: str | None = None) -> None:
        """Count the bytes of an object that was put. Raises NotStored if the store does not hold it."""
        row = self.store.info(self.context, chunk_id, antecedents, kind)
        if row is None:
            raise NotStored(
                f"chunk {chunk_id[:12]} was prefilled but {self.store!r} does not hold the result: a memory "
                "store evicted it; give the store more memory"
            )
        self.bytes += row.bytes

    def _refuse(self, error: KameraError) -> None:
        """Count and log an object that was not accepted."""
        self.refusals += 1
        logger.warning("a stored object was refused: %s", error)

    def _build(self, source: ByContent) -> Chunk:
        try:
            return self.backbone.chunk([dict(item) for item in source.items])
        except KameraError:
            raise
        except ValueError as error:  # the processor's own error, for example for a picture too narrow
            raise UnreadableMedia(f"{source.key[:80]} was refused by the processor: {error}") from error

    def _encode(self, chunk: Chunk) -> Encoded:
        encodings = self.former.encodings
        return encodings.find(chunk) or encodings.make(chunk)

    def _suits(self, row: ObjectInfo, budget: PatchBudget) -> bool:
        orbit = row.kind == "orbit"
        # an empty patch has no number of tokens: its rank stands in
        patch = stored_patch(
            row, budget, row.tokens or budget.rank, None if orbit else self.settings.max_error
        )
        if patch is None or not patch.serves or patch.formed != "exact":
            return False
        return not orbit or (row.orderings or 0) >= ordering_count(
            len(row.antecedents), self.settings.samples
        )


FLUSH_SECONDS = 60.0
"""Seconds a remote may take to store the objects of a step."""

_CHUNKS = 64
"""Most chunks that one step locates."""


@dataclass(frozen=True)
class Step:
    """Progress of a job: ``units`` of `CompileJob.units` are done. ``doing`` is "canonicals" or "patches"."""

    doing: str
    units: int


def run_plan(
    plan: PlanFile, backbone: Backbone | HfEngine, store: ChunkStore, settings: Settings | None = None
) -> CompileReport:
    """Compile a plan completely and report. Raises the errors of `CompileJob`."""
    job = CompileJob(plan, backbone, store, settings or Settings())
    for _ in job.steps():
        pass
    return job.report()


def refuse_ids(windows: Iterable[PlannedWindow], missing: Collection[tuple[System, str]], store: str) -> None:
    """Raise PlanError for chunks given by an id that is ``missing`` under its system prompt."""
    unknown = [
        f"{window.where}: chunks[{i}]: no chunk {source.chunk_id!r} in {store!r} for this "
        "model and system prompt: give the chunk's content, or an id of kamera store ls"
        for window in windows
        for i, source in enumerate(window.chunks)
        if isinstance(source, ById) and (window.system, source.chunk_id) in missing
    ]
    if unknown:
        raise PlanError(unknown)


class CompileJob:
    """One run of a plan; iterating `steps` does the work, `report` gives the present state.

    Raises PlanError, before anything is stored, for a chunk id that the store does not hold and for layers
    that the model lacks. A line that fails by itself (unreadable media, a position limit) is reported and the
    others continue; StoreError ends the run.
    """

    def __init__(
        self, plan: PlanFile, backbone: Backbone | HfEngine, store: ChunkStore, settings: Settings
    ) -> None:
        self.backbone = backbone.engine
        self.store = store
        self.settings = settings
        self.windows = plan.windows[: settings.limit]
        self.chunks = sum(len(window.chunks) for window in self.windows)  # positions in all windows
        self._progress = Progress(self.windows, settings)
        self._account = Account()
        self._refusals = self._bytes = 0
        self._check()

    @property
    def units(self) -> int:
        """Amount of work in the units of `steps`: distinct chunks, and positions."""
        return sum(len(sources) for sources in self._progress.sources.values()) + self.chunks

    def steps(self) -> Iterator[Step]:
        """Do the work, prompt by prompt, so that each anchor is prefilled once."""
        progress = self._progress
        for system, sources in progress.sources.items():
            prompt = self._prompt(system)
            for i in range(0, len(sources), _CHUNKS):
                with self._count(prompt):
                    for source in sources[i : i + _CHUNKS]:
                        progress.enter(system, source, prompt.locate(source))
                yield Step("canonicals", len(sources[i : i + _CHUNKS]))
            branches = progress.branches(system)
            yield Step("patches", progress.count_cut_off(system))
            for branch in branches:
                with self._count(prompt):
                    prompt.grow(branch)
                yield Step("patches", sum(node.places for node in branch.nodes[branch.first :]))

    def report(self) -> CompileReport:
        """The report up to now."""
        progress, work = self._progress, self._account.usage.now
        return CompileReport(
            windows=len(self.windows),
            chunks=self.chunks,
            canonicals=progress.canonicals(),
            patches=progress.patches(),
            orbits=progress.orbits(),
            refused=self._refusals,
            forwards=work.forwards,
            tokens=work.tokens,
            vision_encodes=work.vision_encodes,
            bytes_stored=self._bytes,
            seconds=work.seconds,
            saved_tokens=progress.formed_tokens(),
            failures=progress.failures(),
        )

    # -- inside --------------------------------------------------------------------------------

    def _prompt(self, system: System) -> PromptObjects:
        return PromptObjects(self.backbone, self.store, system, self.settings)

    @contextmanager
    def _count(self, prompt: PromptObjects) -> Iterator[None]:
        """Count the work of the block, and check that its objects are stored."""
        refusals, size = prompt.refusals, prompt.bytes
        with self._account.count_now(self.backbone):
            yield
            outcome = self.store.flush(FLUSH_SECONDS)
        if keys := (*outcome.unsaved, *outcome.dropped):
            raise StoreError(
                f"{self.store.url} has not stored {len(keys)} objects: run again, objects already stored are "
                "not formed again"
            )
        self._refusals += prompt.refusals - refusals
        self._bytes += prompt.bytes - size

    def _check(self) -> None:
        """Refuse ids that the store lacks and layers that the model lacks."""
        unknown_ids = set()
        for system, sources in self._progress.sources.items():
            prompt = self._prompt(system)
            ids = [source.chunk_id for source in sources if isinstance(source, ById)]
            unknown_ids |= {(system, chunk_id) for chunk_id in ids if not prompt.has_canonical(chunk_id)}
        refuse_ids(self.windows, unknown_ids, self.store.url)
        problems = []
        for window in self.windows:
            try:
                self.settings.budget_of(window).check(len(self.backbone.layout))
            except ValueError as error:
                problems.append(f"{window.where}: {error}")
        if problems:
            raise PlanError(problems)
