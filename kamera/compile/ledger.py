"""Progress of a run: the outcome of every position in a plan's windows, and the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from kamera.compile.ordering import Path, Walk, shards, walk
from kamera.compile.plan import ChunkSource, PlannedWindow
from kamera.compile.report import Counts, Failure, Outcome
from kamera.compile.settings import Settings
from kamera.compile.tasks import Branch, Found, Grown, Sources
from kamera.ops import PatchBudget

System = str | None
Node = tuple[System, int]
"""A chunk with its antecedents, numbered by the walk of its system prompt."""

_BATCHES = 8
"""Batches of canonicals in one task, for a team of one worker."""

Key = TypeVar("Key", bound=Hashable)


class Ledger:
    """Outcomes of one run. Results may be entered in any order, and the totals do not depend on it."""

    def __init__(self, windows: Sequence[PlannedWindow], settings: Settings) -> None:
        self.windows = windows
        self._settings = settings
        sources: dict[System, dict[ChunkSource, None]] = {}
        for planned in windows:
            sources.setdefault(planned.system, {}).update(dict.fromkeys(planned.chunks))
        self.sources: dict[System, tuple[ChunkSource, ...]] = {s: tuple(d) for s, d in sources.items()}
        self._found: dict[tuple[System, ChunkSource], Found] = {}
        self._canonicals: set[tuple[System, str]] = set()
        self._walks: dict[System, Walk] = {}
        self._budgets: dict[Node, PatchBudget] = {}
        self._orbit_of: dict[Node, Node] = {}
        self._places: Counter[Node] = Counter()
        self._patches: dict[Node, Outcome] = {}
        self._orbits: set[Node] = set()
        self._errors: dict[Node, tuple[int, str]] = {}
        self._tokens: dict[Node, int] = {}

    # -- tasks ---------------------------------------------------------------------------------

    def locating(self, system: System, parts: int) -> list[Sources]:
        """The distinct chunks of a system prompt, in about ``parts`` tasks (0: tasks that fill batches)."""
        sources = self.sources[system]
        size = -(-len(sources) // parts) if parts else _BATCHES * self._settings.batch
        return [Sources(system, sources[i : i + size]) for i in range(0, len(sources), size)]

    def compiling(self, system: System, parts: int) -> list[tuple[Branch, ...]]:
        """The windows of a system prompt as branches of its trie, in about ``parts`` tasks (0: one each).

        Every chunk must have been entered. One patch is stored per node, so it is formed within the smallest
        budget that satisfies all lines. The first branch with its antecedent set forms an orbit patch, so
        that the result does not depend on the order of the plan.
        """
        windows = [planned for planned in self.windows if planned.system == system]
        walked = self._walks[system] = walk(self._ids(planned) for planned in windows)
        orbits: dict[Node, PatchBudget] = {}
        for planned in windows:
            budget = self._settings.budget_of(planned)
            nodes = self._nodes(planned)
            self._places.update(nodes)
            for node in nodes:
                _join(self._budgets, node, budget)
                if self._settings.orbit_of(planned):
                    _join(orbits, node, budget)
        found = {f.chunk_id: f for (s, _), f in self._found.items() if s == system and f.error is None}
        tokens = {chunk_id: f.tokens for chunk_id, f in found.items()}
        sets: dict[tuple[str, Path], PatchBudget] = {}
        for path, numbers in zip(walked.paths, walked.nodes, strict=True):
            for i, n in enumerate(numbers):
                if (system, n) in orbits:
                    _join(sets, (path[i], tuple(sorted(path[:i]))), orbits[system, n])
        owner: dict[tuple[str, Path], Node] = {}
        branches = []
        for index, (path, numbers, first) in enumerate(
            zip(walked.paths, walked.nodes, walked.shared, strict=True)
        ):
            owed: dict[int, PatchBudget] = {}
            for i in range(max(first, 1), len(path)):
                node = (system, numbers[i])
                self._tokens[node] = tokens[path[i]]
                if node in orbits:
                    over = (path[i], tuple(sorted(path[:i])))
                    kept = owner.setdefault(over, node)
                    self._orbit_of[node] = kept
                    if kept == node:
                        owed[i] = sets[over]
            sources = tuple(found[chunk_id].source for chunk_id in path)
            budgets = tuple(self._budgets[system, n] for n in numbers)
            branches.append(Branch(system, index, path, sources, first, budgets, owed))
        whole = sum(self._tokens[system, n] for s, n in self._tokens if s == system)
        return [
            tuple(branches[run.start : run.stop])
            for run in shards(walked, tokens, limit=whole // parts if parts else 0)
        ]

    def cut_off(self, system: System) -> int:
        """Number of positions outside every branch, because their chunk or one before it is unavailable."""
        return sum(len(w.chunks) - len(self._ids(w)) for w in self.windows if w.system == system)

    # -- results -------------------------------------------------------------------------------

    def enter_found(self, system: System, found: Found) -> None:
        """Enter a located chunk."""
        self._found[system, found.source] = found
        if found.formed:
            self._canonicals.add((system, found.chunk_id))

    def enter_grown(self, branch: Branch, grown: Grown) -> int:
        """Enter a compiled branch; returns the number of positions of the plan that it settles."""
        nodes = [(branch.system, n) for n in self._walks[branch.system].nodes[branch.index]]
        for i in grown.patches:  # including nodes of other branches
            self._patches[nodes[i]] = "formed"
        self._orbits.update(nodes[i] for i in grown.orbits)
        own = range(branch.first, len(nodes))
        for i in own:
            done = grown.failed is None or i < grown.failed
            self._patches.setdefault(nodes[i], "reused" if done else "skipped")
        if grown.failed is not None:
            self._errors[nodes[max(grown.failed, branch.first)]] = (grown.failed, grown.error)
        return sum(self._places[nodes[i]] for i in own)

    # -- totals --------------------------------------------------------------------------------

    def canonicals(self) -> Counts:
        """Counts over the positions whose chunk was located or refused."""
        outcomes: list[tuple[Hashable, Outcome]] = []
        for planned in self.windows:
            for source in planned.chunks:
                found = self._found.get((planned.system, source))
                if found is None:
                    continue
                name = (planned.system, found.chunk_id)
                made: Outcome = "formed" if name in self._canonicals else "reused"
                outcomes.append((name, made) if found.error is None else (source, "skipped"))
        return _counted(outcomes)

    def patches(self) -> Counts:
        """Counts over the settled positions with antecedents."""
        return _counted([(node, outcome) for _, node, outcome in self._settled()])

    def orbits(self) -> Counts:
        """Counts of orbit patches, over the positions of lines that request them."""
        outcomes: list[tuple[Hashable, Outcome]] = []
        for planned, node, outcome in self._settled():
            if not self._settings.orbit_of(planned):
                continue
            kept = None if node is None else self._orbit_of[node]
            if kept is None or "skipped" in (outcome, self._patches.get(kept)):
                outcomes.append((node, "skipped"))
            elif kept in self._patches:
                outcomes.append((kept, "formed" if kept in self._orbits else "reused"))
        return _counted(outcomes)

    def formed_tokens(self) -> int:
        """Tokens of the chunks whose patches were formed, counted per node."""
        return sum(self._tokens[node] for node, outcome in self._patches.items() if outcome == "formed")

    def failures(self) -> tuple[Failure, ...]:
        """One for each line that could not be compiled completely, in the plan's order."""
        problems = [(planned.where, self._problem(planned)) for planned in self.windows]
        return tuple(Failure(where, f"chunks[{p[0]}]: {p[1]}") for where, p in problems if p is not None)

    # -- inside --------------------------------------------------------------------------------

    def _ids(self, planned: PlannedWindow) -> Path:
        """Chunk ids of a window, up to the first unavailable one."""
        ids: list[str] = []
        for source in planned.chunks:
            found = self._found[planned.system, source]
            if found.error is not None:
                break
            ids.append(found.chunk_id)
        return tuple(ids)

    def _nodes(self, planned: PlannedWindow) -> list[Node]:
        nodes = self._walks[planned.system].places(self._ids(planned))
        return [(planned.system, n) for n in nodes]

    def _settled(self) -> Iterator[tuple[PlannedWindow, Node | None, Outcome]]:
        """Settled positions with antecedents; the node is None if a chunk is unavailable."""
        for planned in self.windows:
            if planned.system not in self._walks:
                continue
            nodes = self._nodes(planned)
            yield from ((planned, n, self._patches[n]) for n in nodes[1:] if n in self._patches)
            for _ in range(max(1, len(nodes)), len(planned.chunks)):
                yield planned, None, "skipped"

    def _problem(self, planned: PlannedWindow) -> tuple[int, str] | None:
        if planned.system not in self._walks:
            return None
        nodes = self._nodes(planned)
        for node in nodes:
            if node in self._errors:
                return self._errors[node]
        if len(nodes) == len(planned.chunks):
            return None
        error = self._found[planned.system, planned.chunks[len(nodes)]].error
        return len(nodes), error or ""


def _join(budgets: dict[Key, PatchBudget], key: Key, budget: PatchBudget) -> None:
    """Extend ``budgets[key]`` to the smallest budget that also satisfies ``budget``."""
    budgets[key] = budgets[key].joined(budget) if key in budgets else budget


def _counted(outcomes: Sequence[tuple[Hashable, Outcome]]) -> Counts:
    """Counts of named outcomes: an object formed once counts as reused at its other positions."""
    counts: Counter[Outcome] = Counter()
    seen: set[Hashable] = set()
    for name, outcome in outcomes:
        counts["reused" if outcome == "formed" and name in seen else outcome] += 1
        seen.add(name)
    return Counts(counts["formed"], counts["reused"], counts["skipped"])
