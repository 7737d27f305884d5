"""What is known so far of every place a chunk has in a plan's windows, and what that counts up to."""

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
"""A chunk behind its antecedents, numbered by the walk of its system prompt."""

_BATCHES = 8
"""Batches of canonicals that a task may fill, where one worker does them all."""

Key = TypeVar("Key", bound=Hashable)


class Ledger:
    """Books of one run. Results are entered in any order, and the counts do not depend on it."""

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

    # -- what there is to do -------------------------------------------------------------------

    def locating(self, system: System, parts: int) -> list[Sources]:
        """The system's different chunks, in about ``parts`` tasks (0: enough in each to fill batches)."""
        sources = self.sources[system]
        size = -(-len(sources) // parts) if parts else _BATCHES * self._settings.batch
        return [Sources(system, sources[i : i + size]) for i in range(0, len(sources), size)]

    def compiling(self, system: System, parts: int) -> list[tuple[Branch, ...]]:
        """The system's windows as branches of its trie, in about ``parts`` tasks (0: one each).

        Every chunk must have been entered. A patch that several lines want is formed within the least
        budget that meets them all, as one is stored for each place. An orbit patch is owed by the first
        branch whose set it is, so that who forms it, and from which order, does not depend on the order
        of the plan.
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
        """Places that no branch has, as a chunk before them or their own cannot be had."""
        return sum(len(w.chunks) - len(self._ids(w)) for w in self.windows if w.system == system)

    # -- what was done -------------------------------------------------------------------------

    def enter_found(self, system: System, found: Found) -> None:
        """A chunk was located."""
        self._found[system, found.source] = found
        if found.formed:
            self._canonicals.add((system, found.chunk_id))

    def enter_grown(self, branch: Branch, grown: Grown) -> int:
        """A branch was compiled; how many places of the plan that settles."""
        nodes = [(branch.system, n) for n in self._walks[branch.system].nodes[branch.index]]
        for i in grown.patches:  # those of nodes that are another's, too
            self._patches[nodes[i]] = "formed"
        self._orbits.update(nodes[i] for i in grown.orbits)
        own = range(branch.first, len(nodes))
        for i in own:
            done = grown.failed is None or i < grown.failed
            self._patches.setdefault(nodes[i], "reused" if done else "skipped")
        if grown.failed is not None:
            self._errors[nodes[max(grown.failed, branch.first)]] = (grown.failed, grown.error)
        return sum(self._places[nodes[i]] for i in own)

    # -- what it counts up to ------------------------------------------------------------------

    def canonicals(self) -> Counts:
        """Of every place whose chunk was located or refused."""
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
        """Of every settled place that has antecedents."""
        return _counted([(node, outcome) for _, node, outcome in self._settled()])

    def orbits(self) -> Counts:
        """As `patches`, of orbit patches, at the places of lines that want them."""
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
        """Tokens of the chunks, at their places, whose patches were formed."""
        return sum(self._tokens[node] for node, outcome in self._patches.items() if outcome == "formed")

    def failures(self) -> tuple[Failure, ...]:
        """One for each line that could not be compiled to its end, in their order."""
        failures = []
        for planned in self.windows:
            problem = self._problem(planned)
            if problem is not None:
                failures.append(Failure(planned.where, f"chunks[{problem[0]}]: {problem[1]}"))
        return tuple(failures)

    # -- inside --------------------------------------------------------------------------------

    def _ids(self, planned: PlannedWindow) -> Path:
        """Chunk ids of a window, up to the first that cannot be had."""
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
        """Places that have antecedents, done or given up; without a node where a chunk cannot be had."""
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
    """The least budget that meets what was asked before and this too."""
    budgets[key] = budgets[key].joined(budget) if key in budgets else budget


def _counted(outcomes: Sequence[tuple[Hashable, Outcome]]) -> Counts:
    """Count outcomes of named things: what was formed once was reused at every other place it has."""
    counts: Counter[Outcome] = Counter()
    seen: set[Hashable] = set()
    for name, outcome in outcomes:
        counts["reused" if outcome == "formed" and name in seen else outcome] += 1
        seen.add(name)
    return Counts(counts["formed"], counts["reused"], counts["skipped"])
