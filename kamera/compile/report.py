"""A job's settings, its progress, and its outcome, from counts taken on the model and the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from kamera.compile.plan import ChunkIds, ChunkSource, PlannedWindow, leaves, prefixes
from kamera.content import common_prefix
from kamera.engines import Spent, Usage
from kamera.ops import PatchBudget, layers_of
from kamera.trust import ReusePolicy


@dataclass(frozen=True)
class Settings:
    """Defaults for the lines of a plan: patches within ``rank``, ``patch_bytes`` and ``layers`` (as in
    `ReusePolicy`); with ``orbit`` also one per antecedent set.

    A patch that would leave out more than ``max_error`` (as in `ReusePolicy`) is formed larger.

    ``samples`` and ``seed`` select the orderings that an orbit patch averages (`patches.orderings`);
    ``limit`` compiles the first lines only.
    """

    rank: int = ReusePolicy.rank
    patch_bytes: float | None = ReusePolicy.patch_bytes
    layers: Sequence[int] | str | None = None
    orbit: bool = False
    samples: int | None = None
    seed: int = 0
    limit: int | None = None
    max_error: float | None = ReusePolicy.max_error

    def __post_init__(self) -> None:
        for name in ("rank", "samples", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        object.__setattr__(self, "layers", layers_of(self.layers))
        if self.max_error is not None and not 0.0 <= self.max_error <= 1.0:
            raise ValueError(f"max_error {self.max_error} must lie between 0.0 and 1.0")
        _ = self.budget  # raises for an invalid budget

    @property
    def budget(self) -> PatchBudget:
        """Budget of a patch."""
        return PatchBudget(self.rank, self.patch_bytes, layers_of(self.layers))

    def budget_of(self, line: PlannedWindow) -> PatchBudget:
        """Budget of a patch of this line."""
        rank = self.rank if line.rank is None else line.rank
        layers = self.layers if line.layers is None else line.layers
        return PatchBudget(rank, self.patch_bytes, layers_of(layers))

    def orbit_of(self, line: PlannedWindow) -> bool:
        """True if orbit patches are formed for this line."""
        return self.orbit if line.orbit is None else line.orbit


@dataclass(frozen=True)
class ObjectCounts:
    """``formed`` in this run, ``reused`` from the store, ``skipped`` because their window failed."""

    formed: int = 0
    reused: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Failure:
    """A line that could not be compiled completely. ``where`` is ``file:line``."""

    where: str
    error: str


@dataclass(frozen=True)
class CompileReport:
    """Outcome and cost of compiling a plan. JSON-able by `dataclasses.asdict`.

    ``windows`` are those of the plan (of its first lines, under a limit), ``chunks`` the places in them;
    ``canonicals``, ``patches`` and ``orbits`` count every place a chunk has in a window, so a chunk that
    stands in two windows counts twice. ``refused`` objects were there and not taken: damaged ones were
    made again, those under a key that was not given fail their windows. ``forwards``, ``tokens`` (run
    through the decoder) and ``vision_encodes`` are counted by hooks on the model. ``bytes_stored`` are those
    of the canonicals and patches that were formed, as stored.

    ``seconds`` are those of the work. ``saved_tokens`` are the tokens that one reuse of every patch formed
    here does not prefill.
    """

    windows: int
    chunks: int
    canonicals: ObjectCounts
    patches: ObjectCounts
    orbits: ObjectCounts
    refused: int
    forwards: int
    tokens: int
    vision_encodes: int
    bytes_stored: int
    seconds: float
    saved_tokens: int
    failures: tuple[Failure, ...]

    def usage(self) -> Usage:
        """All model work of the job: equal to hooks. Nothing of a job is background work."""
        return Usage(Spent(self.forwards, self.tokens, self.vision_encodes, self.seconds), Spent())


def add_reports(one: Any, other: Any) -> Any:
    """The sum of two reports, field by field."""
    if not is_dataclass(one):
        return one + other
    sums = {f.name: add_reports(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return replace(one, **sums)  # type: ignore[type-var]


System = str | None


@dataclass(frozen=True)
class Location:
    """A source's chunk: its id and tokens, and True in ``formed`` if it was formed now; or an error."""

    chunk_id: str = ""
    tokens: int = 0
    formed: bool = False
    error: str = ""


@dataclass(eq=False)
class PlanNode:
    """A chunk behind its antecedents: what lines want of it, and what came of it.

    It stands at ``places`` positions of the plan's windows, ``orbit_places`` of them in lines that want an
    orbit patch, which ``owner``, the first node of the same set, forms within ``orbit_budget``. ``outcome``
    is that of its patch, as in `ObjectCounts`, and empty until then.
    """

    source: ChunkSource
    location: Location
    budget: PatchBudget
    places: int = 0
    orbit_budget: PatchBudget | None = None
    orbit_places: int = 0
    owner: PlanNode | None = None
    outcome: str = ""
    orbit_formed: bool = False
    failure: str = ""


@dataclass(frozen=True, eq=False)
class Branch:
    """A window to compile, node by node. Those before ``first`` belong to another branch."""

    path: ChunkIds
    nodes: tuple[PlanNode, ...]
    first: int


class Progress:
    """Outcomes of one run."""

    def __init__(self, windows: Sequence[PlannedWindow], settings: Settings) -> None:
        self.windows = windows
        self._settings = settings
        sources: dict[System, dict[ChunkSource, None]] = {}
        for window in windows:
            sources.setdefault(window.system, {}).update(dict.fromkeys(window.chunks))
        self.sources: dict[System, tuple[ChunkSource, ...]] = {s: tuple(d) for s, d in sources.items()}
        self._locations: dict[tuple[System, ChunkSource], Location] = {}
        self._tries: dict[System, dict[ChunkIds, PlanNode]] = {}

    def enter(self, system: System, source: ChunkSource, location: Location) -> None:
        """Enter the chunk of a source."""
        self._locations[system, source] = location

    def branches(self, system: System) -> list[Branch]:
        """The windows of a system prompt as branches of its trie, in the order of the walk.

        Every chunk must have been entered. One patch is stored per node, so it is formed within the smallest
        budget that satisfies all lines. The first node with its antecedent set forms an orbit patch, so
        that the result does not depend on the order of the plan.
        """
        trie = self._tries[system] = self._trie(system)
        walk = leaves(trie)
        return [
            Branch(path, tuple(trie[prefix] for prefix in prefixes(path)), common_prefix(previous, path))
            for previous, path in zip([(), *walk], walk, strict=False)
        ]

    def count_cut_off(self, system: System) -> int:
        """Number of positions outside every branch, because their chunk or one before it is unavailable."""
        return sum(len(w.chunks) - len(self._path(w)) for w in self.windows if w.system == system)

    # -- totals --------------------------------------------------------------------------------

    def canonicals(self) -> ObjectCounts:
        """Counts over the positions whose chunk was located or refused."""
        counts: Counter[str] = Counter()
        new_keys = {(s, row.chunk_id) for (s, _), row in self._locations.items() if row.formed}
        for window in self.windows:
            for source in window.chunks:
                row = self._locations.get((window.system, source))
                if row is not None and row.error:
                    counts["skipped"] += 1
                elif row is not None:
                    counts["formed" if (window.system, row.chunk_id) in new_keys else "reused"] += 1
                    new_keys.discard((window.system, row.chunk_id))  # formed once, and then reused
        return ObjectCounts(**counts)

    def patches(self) -> ObjectCounts:
        """Counts over the settled positions with antecedents."""
        counts = Counter(skipped=sum(self._absent(window) for window in self.windows))
        for path, node in self._nodes():
            if node.outcome and len(path) > 1:
                counts[node.outcome] += node.places
                if node.outcome == "formed":
                    counts.update(formed=1 - node.places, reused=node.places - 1)
        return ObjectCounts(**counts)

    def orbits(self) -> ObjectCounts:
        """Counts of orbit patches, over the positions of lines that request them."""
        windows = [window for window in self.windows if self._settings.orbit_of(window)]
        counts = Counter(skipped=sum(self._absent(window) for window in windows))
        owners: set[PlanNode] = set()
        for path, node in self._nodes():
            owner = node.owner
            if owner is None or not node.outcome or len(path) < 2:
                continue
            if "skipped" in (node.outcome, owner.outcome):
                counts["skipped"] += node.orbit_places
            elif owner.outcome:
                counts["reused"] += node.orbit_places
                owners.update([owner] if owner.orbit_formed else [])
        counts.update(formed=len(owners), reused=-len(owners))
        return ObjectCounts(**counts)

    def formed_tokens(self) -> int:
        """Tokens of the chunks whose patches were formed, counted per node."""
        return sum(node.location.tokens for _, node in self._nodes() if node.outcome == "formed")

    def failures(self) -> tuple[Failure, ...]:
        """One for each line that could not be compiled completely, in the plan's order."""
        problems = [(window.where, self._problem(window)) for window in self.windows]
        return tuple(Failure(where, f"chunks[{p[0]}]: {p[1]}") for where, p in problems if p is not None)

    # -- inside --------------------------------------------------------------------------------

    def _path(self, window: PlannedWindow) -> ChunkIds:
        """Chunk ids of a window, up to the first unavailable one."""
        ids: list[str] = []
        for source in window.chunks:
            location = self._locations[window.system, source]
            if location.error:
                break
            ids.append(location.chunk_id)
        return tuple(ids)

    def _trie(self, system: System) -> dict[ChunkIds, PlanNode]:
        """The nodes of a system prompt's windows, with what lines want of them, in the order of the walk."""
        trie: dict[ChunkIds, PlanNode] = {}
        for window in self.windows:
            if window.system != system:
                continue
            budget, orbit = self._settings.budget_of(window), self._settings.orbit_of(window)
            for source, path in zip(window.chunks, prefixes(self._path(window)), strict=False):
                node = trie.setdefault(path, PlanNode(source, self._locations[system, source], budget))
                node.places += 1
                node.budget = node.budget.union(budget)
                if orbit:
                    node.orbit_places += 1
                    node.orbit_budget = _join(node.orbit_budget, budget)
        owners: dict[tuple[str, ChunkIds], PlanNode] = {}
        for path in sorted(trie):
            node = trie[path]
            if node.orbit_budget is not None and len(path) > 1:
                node.owner = owners.setdefault((path[-1], tuple(sorted(path[:-1]))), node)
                node.owner.orbit_budget = _join(node.owner.orbit_budget, node.orbit_budget)
        return trie

    def _nodes(self) -> list[tuple[ChunkIds, PlanNode]]:
        return [item for trie in self._tries.values() for item in trie.items()]

    def _absent(self, window: PlannedWindow) -> int:
        """Positions with antecedents of a window that is being compiled whose chunk is unavailable."""
        if window.system not in self._tries:
            return 0
        return len(window.chunks) - max(1, len(self._path(window)))

    def _problem(self, window: PlannedWindow) -> tuple[int, str] | None:
        if window.system not in self._tries:
            return None
        path = self._path(window)
        for i, prefix in enumerate(prefixes(path)):
            if failure := self._tries[window.system][prefix].failure:
                return i, failure
        if len(path) == len(window.chunks):
            return None
        return len(path), self._locations[window.system, window.chunks[len(path)]].error


def _join(one: PatchBudget | None, other: PatchBudget) -> PatchBudget:
    """The smallest budget that satisfies both."""
    return other if one is None else one.union(other)
