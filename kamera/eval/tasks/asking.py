"""Samples of a benchmark as cases: their chunks that fit, the live ones apart; asked under arms."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Literal

from kamera.engines.hf import HfEngine
from kamera.eval.adapter import Adapter, ArmQuestion, Reply, Unit
from kamera.eval.arms import NATIVE, REPREFILL, Maker
from kamera.eval.desk import Desk
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.sample import Task, TaskSample
from kamera.eval.tasks.shrink import Shrink
from kamera.eval.trial import UNANSWERED, Trial
from kamera.forks import lazy
from kamera.patches import Anchor, prefill_anchor

ReusedPart = Literal["context", "all"]
"""Reused part: the context, or also the live parts before the prompt's last text."""


@dataclass(frozen=True)
class Case:
    """A question behind the last of some windows, each an order of units by name; ``note`` as in `Trial`."""

    note: str
    units: Mapping[str, Unit]
    windows: tuple[tuple[str, ...], ...]
    query: ArmQuestion


class TaskAsker:
    """Asks samples under arms, one by one; ``limit`` bounds anchor, prompt and answer together, in tokens."""

    def __init__(
        self,
        backbone: HfEngine,
        task: Task,
        system: str | None,
        limit: int | None,
        reuse: ReusedPart = "context",
        shrink: Shrink | None = None,
    ) -> None:
        self.backbone, self.task, self.system = backbone, task, system
        self.limit, self.reuse, self.shrink = limit, reuse, shrink or Shrink()
        self.around = backbone.builder.anchor_ids(system).shape[0]

    @lazy
    def _anchor(self) -> Anchor:
        """Run when the first sample is asked."""
        return prefill_anchor(self.backbone, self.system)

    def trials(
        self, sample: TaskSample, makers: Mapping[str, Maker], ideal: FirstToken | None = None
    ) -> Iterator[Trial]:
        """One trial of each arm, the re-prefill first, as the others are compared with it (``ideal`` is its
        first token, if it is not among them). Each arm gets a new adapter; errors are in the trials.
        """
        desk = Desk(self.backbone, self.system, self._anchor)
        try:
            case: Case | Exception = self._fit(desk, sample)
        except Exception as error:
            case = error
        for name in sorted(makers, key=REPREFILL.__ne__):
            trial = Trial(sample.id, name)
            if isinstance(case, Exception):
                yield trial.with_error(case)
                continue
            trial = replace(trial, note=case.note)
            if not case.windows:
                yield replace(trial, answer=UNANSWERED)
                continue
            try:
                reply, placed, answered = _ask(makers[name](desk), case)
                if name == REPREFILL:
                    ideal = FirstToken.of(reply.logits)
                yield replace(
                    _add_price(trial, desk, case, reply),
                    answer=reply.text.strip(),  # as the benchmarks' own runs do: their scorers need it
                    first_token=None if ideal is None else ideal.again(reply.logits),
                    ttft_seconds=placed + reply.first_token_seconds,
                    answer_seconds=placed + answered,
                )
            except Exception as error:
                yield trial.with_error(error)

    def _fit(self, desk: Desk, sample: TaskSample) -> Case:
        """The sample's case, cut to fit; one without windows if that is impossible."""
        units, most = self._units(sample), self.task.max_new_tokens(sample)
        sizes = [desk.chunk(unit).num_tokens for unit in units]
        question = self.backbone.builder.tokenize(sample.question).shape[0]
        over = 0 if self.limit is None else sum(sizes) + question + self.around + most - self.limit
        cut = sample.head
        # what is live stays, with all behind it
        context = len(units) - sum(unit.live for unit in units) if self.task.overlong == "left" else 0
        while over > 0 and cut < context:
            over -= sizes[cut]
            cut += 1
        if over > 0:
            return Case("over-length", {}, (), ArmQuestion(sample.question))
        shown = [*units[: sample.head], *units[cut:]]
        end = max((index for index, unit in enumerate(shown, 1) if not unit.live), default=0)
        window, arriving = shown[:end], shown[end:]
        query = ArmQuestion(sample.question, tuple(arriving), most)
        order = tuple(unit.name for unit in window)
        others = [Unit(f"o{i}", self.shrink.content(part)) for i, part in enumerate(sample.others)]
        names = [*(f"u{i}" for i in range(len(sample.parts))), *(unit.name for unit in others)]
        windows = (*(tuple(names[i] for i in before) for before in sample.before), order)
        note = "cut" if cut > sample.head else ""
        return Case(note, {unit.name: unit for unit in (*window, *others)}, windows, query)

    def _units(self, sample: TaskSample) -> list[Unit]:
        """Adjacent live parts are one unit, because they arrive together, with the question."""
        units: list[Unit] = []
        shown = sample.parts if self.reuse == "context" else [replace(p, live=False) for p in sample.parts]
        for live, parts in groupby(shown, attrgetter("live")):
            items = [self.shrink.content(part) for part in parts]
            for content in [[*chain(*items)]] if live else items:
                units.append(Unit(f"u{len(units)}", content, live))
        return units


def room_of(backbone: HfEngine) -> int | None:
    """How many tokens the model was made for, or serves at all."""
    bounds = (getattr(backbone.config, "max_position_embeddings", None), backbone.limits.below)
    return min((bound for bound in bounds if bound), default=None)


def _ask(adapter: Adapter, case: Case) -> tuple[Reply, float, float]:
    """The reply behind a trace, the seconds of placing its last window, and those of the whole answer."""
    for unit in case.units.values():
        adapter.encode(unit)
    *before, last = case.windows
    if adapter.rehearsed:
        adapter.place(last)
    for window in before:
        adapter.place(window)
    started = time.perf_counter()
    adapter.place(last)
    placed = time.perf_counter()
    reply = adapter.ask(case.query)
    return reply, placed - started, time.perf_counter() - placed


def _add_price(trial: Trial, desk: Desk, case: Case, reply: Reply) -> Trial:
    per_token = desk.backbone.facts.bytes_per_token
    arriving = () if trial.arm == NATIVE else case.query.live  # its window holds them
    live = sum(desk.chunk(unit).num_tokens for unit in arriving)
    inside = desk.tokens([name for name in case.windows[-1] if case.units[name].live])
    question = 0 if trial.arm == NATIVE else desk.backbone.builder.tokenize(case.query.text).shape[0]
    return replace(
        trial,
        window_tokens=reply.window_tokens,
        recomputed_tokens=reply.recomputed_tokens,
        kept_bytes=reply.kept_bytes,
        forwards=reply.forwards,
        question_tokens=question,
        live_tokens=live,
        live_forwards=len(arriving),
        patch_bytes=max(0, reply.kept_bytes - (reply.window_tokens - inside) * per_token),
        kv_bytes=(reply.window_tokens + live) * per_token,
    )
