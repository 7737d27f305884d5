"""Progress of a run: the outcome of every position in a plan's windows, and the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kamera.compile.plan import ChunkSource, PlannedWindow
from kamera.compile.report import Failure, ObjectCounts
from kamera.compile.settings import Settings
from kamera.compile.tasks import Branch, Growth, Location, Sources
from kamera.compile.trie import Path, leaves, prefixes, shards
from kamera.content import common_prefix
from kamera.ops import PatchBudget

System = str | None

_CHUNKS = 64
"""Most chunks that one task locates."""

_PARTS = 4
"""Tasks per worker in a team of several: few repeat little prefill, many end at about the same time."""


@dataclass(eq=False)
class PlanNode:
    """A chunk behind its antecedents: what lines want of it, and what came of it.

    It stands at ``places`` positions of the plan's windows, ``orbit_places`` of them in lines that want an
    orbit patch, which ``owner``, the first node of the same set, forms within ``orbit_budget``. ``outcome``
    is that of its patch, as in `ObjectCounts`, and empty until then.
    """

    location: Location
    budget: PatchBudget
    places: int = 0
    orbit_budget: PatchBudget | None = None
    orbit_places: int = 0
    owner: PlanNode | None = None
    outcome: str = ""
    orbit_formed: bool = False
    failure: tuple[int, str] | None = None


class Progress:
    """Outcomes of one run. Results may be entered in any order, and the totals do not depend on it."""

    def __init__(self, windows: Sequence[PlannedWindow], settings: Settings) -> None:
        self.windows = windows
        self._settings = settings
        sources: dict[System, dict[ChunkSource, None]] = {}
        for planned in windows:
            sources.setdefault(planned.system, {}).update(dict.fromkeys(planned.chunks))
        self.sources: dict[System, tuple[ChunkSource, ...]] = {s: tuple(d) for s, d in sources.items()}
        self._locations: dict[tuple[System, ChunkSource], Location] = {}
        self._tries: dict[System, dict[Path, PlanNode]] = {}

    # -- tasks ---------------------------------------------------------------------------------

    def locating(self, system: System, workers: int) -> list[Sources]:
        """The distinct chunks of a system prompt, in tasks for a team of so many workers."""
        sources, size = self.sources[system], _CHUNKS
        if workers > 1:
            size = min(size, -(-len(sources) // (_PARTS * workers)))
        return [Sources(system, sources[i : i + size]) for i in range(0, len(sources), size)]

    def compiling(self, system: System, workers: int) -> list[tuple[Branch, ...]]:
        """The windows of a system prompt as branches of its trie, in tasks for so many workers.

        Every chunk must have been entered. One patch is stored per node, so it is formed within the smallest
        budget that satisfies all lines. The first node with its antecedent set forms an orbit patch, so
        that the result does not depend on the order of the plan.
        """
        trie = self._tries[system] = self._trie(system)
        walk = leaves(trie)
        branches = {
            path: self._branch(system, path, common_prefix(before, path))
            for before, path in zip([(), *walk], walk, strict=False)
        }
        tokens = {path[-1]: node.location.tokens for path, node in trie.items()}
        whole = sum(node.location.tokens for node in trie.values())
        limit = whole // (_PARTS * workers) if workers > 1 else 0
        return [tuple(branches[path] for path in run) for run in shards(walk, tokens, limit)]

    def cut_off(self, system: System) -> int:
        """Number of positions outside every branch, because their chunk or one before it is unavailable."""
        return sum(len(w.chunks) - len(self._path(w)) for w in self.windows if w.system == system)

    # -- results -------------------------------------------------------------------------------

    def enter_location(self, system: System, location: Location) -> None:
        """Enter a located chunk."""
        self._locations[system, location.source] = location

    def enter_growth(self, branch: Branch, growth: Growth) -> int:
        """Enter a compiled branch; returns the number of positions of the plan that it settles."""
        trie = self._tries[branch.system]
        nodes = [trie[path] for path in prefixes(branch.path)]
        for i in growth.patches:  # including nodes of other branches
            nodes[i].outcome = "formed"
        for i in growth.orbits:
            nodes[i].orbit_formed = True
        end = len(nodes) if growth.failure is None else growth.failure[0]
        for i in range(branch.first, len(nodes)):
            nodes[i].outcome = nodes[i].outcome or ("reused" if i < end else "skipped")
        if growth.failure is not None:
            nodes[max(end, branch.first)].failure = growth.failure
        return sum(node.places for node in nodes[branch.first :])

    # -- totals --------------------------------------------------------------------------------

    def canonicals(self) -> ObjectCounts:
        """Counts over the positions whose chunk was located or refused."""
        counts: Counter[str] = Counter()
        formed = {(s, row.chunk_id) for (s, _), row in self._locations.items() if row.formed}
        for planned in self.windows:
            for source in planned.chunks:
                row = self._locations.get((planned.system, source))
                if row is not None and row.error is not None:
                    counts["skipped"] += 1
                elif row is not None:
                    counts["formed" if (planned.system, row.chunk_id) in formed else "reused"] += 1
                    formed.discard((planned.system, row.chunk_id))  # formed once, and then reused
        return ObjectCounts(**counts)

    def patches(self) -> ObjectCounts:
        """Counts over the settled positions with antecedents."""
        counts = Counter(skipped=sum(self._absent(planned) for planned in self.windows))
        for path, node in self._nodes():
            if node.outcome and len(path) > 1:
                counts[node.outcome] += node.places
                if node.outcome == "formed":
                    counts.update(formed=1 - node.places, reused=node.places - 1)
        return ObjectCounts(**counts)

    def orbits(self) -> ObjectCounts:
        """Counts of orbit patches, over the positions of lines that request them."""
        wanted = [planned for planned in self.windows if self._settings.orbit_of(planned)]
        counts = Counter(skipped=sum(self._absent(planned) for planned in wanted))
        formed: set[PlanNode] = set()
        for path, node in self._nodes():
            owner = node.owner
            if owner is None or not node.outcome or len(path) < 2:
                continue
            if "skipped" in (node.outcome, owner.outcome):
                counts["skipped"] += node.orbit_places
            elif owner.outcome:
                counts["reused"] += node.orbit_places
                formed.update([owner] if owner.orbit_formed else [])
        counts.update(formed=len(formed), reused=-len(formed))
        return ObjectCounts(**counts)

    def formed_tokens(self) -> int:
        """Tokens of the chunks whose patches were formed, counted per node."""
        return sum(node.location.tokens for _, node in self._nodes() if node.outcome == "formed")

    def failures(self) -> tuple[Failure, ...]:
        """One for each line that could not be compiled completely, in the plan's order."""
        problems = [(planned.where, self._problem(planned)) for planned in self.windows]
        return tuple(Failure(where, f"chunks[{p[0]}]: {p[1]}") for where, p in problems if p is not None)

    # -- inside --------------------------------------------------------------------------------

    def _path(self, planned: PlannedWindow) -> Path:
        """Chunk ids of a window, up to the first unavailable one."""
        ids: list[str] = []
        for source in planned.chunks:
            location = self._locations[planned.system, source]
            if location.error is not None:
                break
            ids.append(location.chunk_id)
        return tuple(ids)

    def _trie(self, system: System) -> dict[Path, PlanNode]:
        """The nodes of a system prompt's windows, with what lines want of them, in the order of the walk."""
        trie: dict[Path, PlanNode] = {}
        for planned in self.windows:
            if planned.system != system:
                continue
            budget, orbit = self._settings.budget_of(planned), self._settings.orbit_of(planned)
            for source, path in zip(planned.chunks, prefixes(self._path(planned)), strict=False):
                node = trie.setdefault(path, PlanNode(self._locations[system, source], budget))
                node.places += 1
                node.budget = node.budget.joined(budget)
                if orbit:
                    node.orbit_places += 1
                    node.orbit_budget = _join(node.orbit_budget, budget)
        owners: dict[tuple[str, Path], PlanNode] = {}
        for path in sorted(trie):
            node = trie[path]
            if node.orbit_budget is not None and len(path) > 1:
                node.owner = owners.setdefault((path[-1], tuple(sorted(path[:-1]))), node)
                node.owner.orbit_budget = _join(node.owner.orbit_budget, node.orbit_budget)
        return trie

    def _branch(self, system: System, path: Path, first: int) -> Branch:
        nodes = [self._tries[system][prefix] for prefix in prefixes(path)]
        owed = [(i, node) for i, node in enumerate(nodes) if i >= first and node.owner is node]
        return Branch(
            system,
            path,
            tuple(node.location.source for node in nodes),
            first,
            tuple(node.budget for node in nodes),
            {i: node.orbit_budget for i, node in owed if node.orbit_budget is not None},
        )

    def _nodes(self) -> list[tuple[Path, PlanNode]]:
        return [item for trie in self._tries.values() for item in trie.items()]

    def _absent(self, planned: PlannedWindow) -> int:
        """Positions with antecedents of a window that is being compiled whose chunk is unavailable."""
        if planned.system not in self._tries:
            return 0
        return len(planned.chunks) - max(1, len(self._path(planned)))

    def _problem(self, planned: PlannedWindow) -> tuple[int, str] | None:
        if planned.system not in self._tries:
            return None
        path = self._path(planned)
        for prefix in prefixes(path):
            failure = self._tries[planned.system][prefix].failure
            if failure is not None:
                return failure
        if len(path) == len(planned.chunks):
            return None
        return len(path), self._locations[planned.system, planned.chunks[len(path)]].error or ""


def _join(one: PatchBudget | None, other: PatchBudget) -> PatchBudget:
    """The smallest budget that satisfies both."""
    return other if one is None else one.joined(other)
