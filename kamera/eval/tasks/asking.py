"""Samples of a benchmark as cases: their chunks that fit, the live ones apart; asked under arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, groupby
from typing import Literal

from kamera.engines.hf import HfEngine
from kamera.eval.adapter import ArmQuestion, Unit
from kamera.eval.arms import Maker
from kamera.eval.desk import Desk
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.sample import Part, Task, TaskSample
from kamera.eval.tasks.shrink import Shrink
from kamera.eval.trial import UNANSWERED, Case, Trial, trials
from kamera.patches import anchor_ids

ReusedPart = Literal["context", "all"]
"""Reused part: the context, or also the live parts before the prompt's last text."""


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
        self.around = anchor_ids(backbone, system).shape[0]

    @cached_property
    def _desk(self) -> Desk:
        """Made when the first sample is asked: it runs the anchor."""
        return Desk(self.backbone, self.system)

    def trials(
        self, sample: TaskSample, makers: Mapping[str, Maker], ideal: FirstToken | None = None
    ) -> Iterator[Trial]:
        """One trial for each arm (`kamera.eval.trial.trials`). Errors are in them, never raised."""
        desk, blank = self._desk.cleared(), Trial(sample.id, "")
        try:
            case = self._fitted(desk, sample, blank)
        except Exception as error:
            case = blank.failed(error)
        if isinstance(case, Trial):
            yield from (replace(case, arm=arm) for arm in makers)
        else:
            yield from trials(desk, case, makers, ideal)

    def _fitted(self, desk: Desk, sample: TaskSample, blank: Trial) -> Case | Trial:
        """The sample's case, cut to fit; its trial if that is impossible."""
        units, most = self._units(sample), self.task.max_new_tokens(sample)
        sizes = [desk.chunk(unit).num_tokens for unit in units]
        question = self.backbone.tokenize(sample.question).shape[0]
        over = 0 if self.limit is None else sum(sizes) + question + self.around + most - self.limit
        cut = sample.head
        # what is live stays, with all behind it
        context = len(units) - sum(unit.live for unit in units) if self.task.overlong == "left" else 0
        while over > 0 and cut < context:
            over -= sizes[cut]
            cut += 1
        if over > 0:
            return replace(blank, answer=UNANSWERED, note="over-length")
        shown = [*units[: sample.head], *units[cut:]]
        end = max((index for index, unit in enumerate(shown, 1) if not unit.live), default=0)
        window, arriving = shown[:end], shown[end:]
        query = ArmQuestion(sample.question, tuple(arriving), most)
        order = tuple(unit.name for unit in window)
        others = [Unit(f"o{i}", self.shrink.content(part)) for i, part in enumerate(sample.others)]
        names = [*(f"u{i}" for i in range(len(sample.parts))), *(unit.name for unit in others)]
        windows = (*(tuple(names[i] for i in before) for before in sample.before), order)
        blank = replace(blank, note="cut" if cut > sample.head else "")
        return Case(blank, {unit.name: unit for unit in (*window, *others)}, windows, query)

    def _units(self, sample: TaskSample) -> list[Unit]:
        """Adjacent live parts are one unit, because they arrive together, with the question."""
        units: list[Unit] = []
        for live, parts in groupby(sample.parts, self._is_live):
            items = [self.shrink.content(part) for part in parts]
            for content in [[*chain(*items)]] if live else items:
                units.append(Unit(f"u{len(units)}", content, live))
        return units

    def _is_live(self, part: Part) -> bool:
        return part.live and self.reuse == "context"


def room_of(backbone: HfEngine) -> int | None:
    """How many tokens the model was made for, or serves at all."""
    bounds = (getattr(backbone.config, "max_position_embeddings", None), backbone.limits.below)
    return min((bound for bound in bounds if bound), default=None)
