"""The arms of a benchmark run: `KameraWindow`s over the same chunks and the same store.

Only `NATIVE` has no window: it asks the model without Kamera (`kamera.eval.tasks.native`). Arms of other
modules (`kamera.eval.adapter`) place the context in their own way (`Windows.adapted`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kamera.content import Chunk
from kamera.engines.hf import Backbone
from kamera.errors import StoreError
from kamera.eval.adapter import Answer, Maker, Question, Unit
from kamera.eval.desk import Desk
from kamera.patches import Guarantee
from kamera.store import ChunkStore
from kamera.window import KameraWindow, OnMiss, Report, ReusePolicy

REFERENCE = "reprefill"
BLIND = "blind"
NATIVE = "native"
KNOWN = f"{NATIVE}, {REFERENCE}, {BLIND}, patch@RANK"
_KEPT = "64GiB"  # for one sample's canonicals and patches at a time


@dataclass(frozen=True)
class Arm:
    """``native``, ``reprefill``, ``blind``, ``patch@RANK`` (then ``rank`` is set), or one of another module
    (then ``make`` is set)."""

    name: str
    rank: int | None = None
    make: Maker | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of filling the window, without question and answer.

    ``bytes`` are those of the applied patches, ``kv_bytes`` those of the chunks' live KV.
    """

    seconds: float
    forwards: int
    tokens_recomputed: int
    bytes: int
    kv_bytes: int


def parse_arms(names: Sequence[str], others: Mapping[str, Maker] | None = None) -> tuple[Arm, ...]:
    """Arms by name, ``others`` among them (`kamera.eval.adapter.arms_of`).

    Raises ValueError, with the list, for an unknown one, and for one given twice.
    """
    others = others or {}
    known = ", ".join((KNOWN, *others))
    arms = tuple(_parse(name, others, known) for name in names)
    if not arms or len(set(names)) < len(names):
        raise ValueError(f"arms {', '.join(names) or '(none)'}: give each of {known} at most once")
    return arms


def _parse(name: str, others: Mapping[str, Maker], known: str) -> Arm:
    if name in (NATIVE, REFERENCE, BLIND):
        return Arm(name)
    if name in others:
        return Arm(name, make=others[name])
    match = re.fullmatch(r"patch@([1-9]\d*)", name)
    if match is None:
        raise ValueError(f"arm {name!r} is none of {known}")
    return Arm(name, int(match[1]))


class Windows:
    """One sample's chunks under every arm.

    The store is shared, so pixels are encoded once. Each chunk's canonical is archived before any arm is
    measured, except those with indices in ``live``, which every arm prefills in context and none stores.
    Ask `window` for the blind arm before the first patch: stored patches would serve it.
    """

    def __init__(
        self,
        backbone: Backbone,
        chunks: Sequence[Chunk],
        system: str | None,
        live: Collection[int] = (),
    ) -> None:
        self.backbone = backbone
        self.chunks = chunks
        self.live = frozenset(live)
        self.system = system
        self.store = ChunkStore.open("memory://", memory_limit=_KEPT)
        self._formed = 0
        alone = self._empty(_policy("exact"))
        for index, chunk in enumerate(chunks):
            if index not in self.live:
                alone.append(chunk)
                alone.evict(0)

    def window(self, arm: Arm) -> tuple[KameraWindow, Cost]:
        """The window of an arm, and its cost. Ask for lower ranks first, so that each arm's patches are
        formed at its own rank.

        Raises StoreError if a reusing arm had to run a forward (the store lost an object).
        """
        if arm.name == REFERENCE:
            return self._filled(_policy("exact", "prefill"))
        if arm.rank is None:
            return self._reused(_policy("blind", "blind"))
        if self._formed < arm.rank:
            self._filled(_policy("exact", "form", arm.rank))
            self._formed = arm.rank
        window, cost = self._reused(_policy("patched", "blind", arm.rank))
        if window.guarantee == "blind":
            raise StoreError(f"a patch of arm {arm.name} was not stored: the sample outgrew {_KEPT}")
        return window, cost

    def adapted(self, make: Maker, question: str, max_new_tokens: int) -> tuple[Answer, Cost]:
        """The answer of another module's arm, which places the context; live chunks come with the question.

        Raises ValueError if a live chunk stands before a reused one.
        """
        reused = [index for index in range(len(self.chunks)) if index not in self.live]
        if reused != list(range(len(reused))):
            raise ValueError(
                "a live part stands inside the context: arms of other modules take it behind only"
            )
        adapter = make(Desk(self.backbone, self.system))
        names = [f"u{index}" for index in reused]
        for name, index in zip(names, reused, strict=True):
            adapter.encode(Unit(name, self.chunks[index]))
        if adapter.rehearsed:
            adapter.place(names)
        started = time.perf_counter()
        adapter.place(names)
        seconds = time.perf_counter() - started
        arriving = tuple(self.chunks[index] for index in sorted(self.live))
        answer = adapter.ask(Question(question, arriving, max_new_tokens))
        tokens = round(answer.recomputed_tokens) + sum(chunk.num_tokens for chunk in arriving)
        kv_bytes = answer.window_tokens * self.backbone.bytes_per_token
        stored = max(0, answer.kept_bytes - kv_bytes)  # beyond the canonicals
        return answer, Cost(seconds, answer.forwards + len(arriving), tokens, stored, kv_bytes)

    def _reused(self, policy: ReusePolicy) -> tuple[KameraWindow, Cost]:
        window, cost = self._filled(policy)
        lost = cost.forwards - len(self.live)
        if lost > 0:
            raise StoreError(f"{lost} chunks were not stored: the sample outgrew {_KEPT}")
        return window, cost

    def _filled(self, policy: ReusePolicy) -> tuple[KameraWindow, Cost]:
        window = self._empty(policy)
        # "later" means never: live chunks do not leave the window
        reports = [
            window.append(chunk, archive="later" if index in self.live else "now")
            for index, chunk in enumerate(self.chunks)
        ]
        return window, _cost(reports, sum(slot.bytes for slot in window.slots))

    def _empty(self, policy: ReusePolicy) -> KameraWindow:
        return KameraWindow(self.backbone, self.store, self.system, policy=policy)


def _policy(minimum: Guarantee, on_miss: OnMiss = "form", rank: int = 1) -> ReusePolicy:
    # uncertified: a certificate is made from an evaluation
    return ReusePolicy(minimum=minimum, on_miss=on_miss, rank=rank, certified=False, forms="always")


def _cost(reports: Sequence[Report], kv_bytes: int) -> Cost:
    total: dict[str, Any] = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("seconds", "forwards", "tokens_recomputed", "bytes_patched")
    }
    return Cost(
        total["seconds"], total["forwards"], total["tokens_recomputed"], total["bytes_patched"], kv_bytes
    )
