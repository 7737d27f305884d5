"""All arms in all setups of one bed, and whether each setup sees each arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kamera import testbed
from kamera.certify.metrics import Items, bootstrap, eta_interval
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import prefill_anchor
from kamera.trust import Estimate
from lab.paper.trial import Judged, Trial
from lab.sabotage.arms import BLIND, SOUND, blind, sabotage, sound
from lab.sabotage.setups import ELSEWHERE, SETUPS, Bench, Setup, questions, situation

PER_WINDOW = 32
PATIENCE = 12
"""Windows without a single question after which a setup has nothing to ask in this world."""
MARGIN = 0.05
"""What an arm must lose against the sound one, in decisions or in nats, for certain, to be seen."""
ANSWERS = 0.6
"""The re-prefill's accuracy below which a backbone cannot do what a setup asks (one of two is chance)."""
ENOUGH = 64
"""Questions after which a setup that the backbone cannot answer is left."""


@dataclass(frozen=True)
class Row:
    """One arm in one setup, over all questions.

    `eta` is taken from blind reuse. `lost` is the share of the sound arm's agreement with the re-prefill
    that is gone, `excess` the KL (nats) above the sound arm's, both in pairs. `seen` is `decisions`,
    `likelihood` or empty.
    """

    arm: str
    n: int
    accuracy: Estimate
    kl: Estimate
    eta: Estimate
    lost: Estimate
    excess: Estimate
    seen: str


@dataclass(frozen=True)
class Asked:
    """One setup: the re-prefill's accuracy, and every arm. Without questions `rows` is empty."""

    setup: Setup
    n: int
    windows: int
    reprefill: Estimate
    rows: tuple[Row, ...]

    @property
    def answered(self) -> bool:
        """Whether the backbone can do what is asked at all."""
        return self.n > 0 and self.reprefill.mean >= ANSWERS


@dataclass(frozen=True)
class Bed:
    """A world and a backbone."""

    world: str
    backbone: str
    axes: int
    asked: tuple[Asked, ...]

    def seen(self, arm: str) -> dict[str, str]:
        """How each setup that the backbone can answer sees an arm, of those that do."""
        return {
            one.setup.name: row.seen
            for one in self.asked
            if one.answered
            for row in one.rows
            if row.arm == arm and row.seen
        }

    @property
    def blind_to(self) -> tuple[str, ...]:
        """Sabotage that changes no decision in any setup."""
        return tuple(arm for arm in sabotage(self.axes) if "decisions" not in self.seen(arm).values())


def measure(
    name: str,
    backbone: HfEngine,
    world: str,
    *,
    items: int,
    rank: int,
    seed: int = 0,
    setups: Sequence[Setup] = SETUPS,
) -> Iterator[str | Bed]:
    """Ask at least `items` questions of each setup that has any; says what it does, at last the bed."""
    bench = Bench(backbone, prefill_anchor(backbone, testbed.SYSTEM), world, seed, rank)
    axes, asked = len(bench.anchor.positions), []
    for setup in setups:
        yield f"{name}, {world}: {setup.name}"
        asked.append(_ask(bench, setup, axes, items))
    yield Bed(world, name, axes, tuple(asked))


def _ask(bench: Bench, setup: Setup, axes: int, items: int) -> Asked:
    arms = {SOUND: sound, BLIND: blind, **sabotage(axes)}
    judged: dict[str, list[Judged]] = {name: [] for name in ("reprefill", *arms)}
    done = index = windows = 0
    another = None
    while done < items and (done or index < PATIENCE):
        chosen = questions(bench.episode(setup, index), setup, min(PER_WINDOW, items - done))
        if chosen:
            another = another or situation(bench, setup, ELSEWHERE).patch
            served = situation(bench, setup, index)
            trial, material = Trial(served.scene, chosen), served.material(another, index)
            another = served.patch
            judged["reprefill"].append(trial.reprefill)
            for name, serve in arms.items():
                judged[name].append(trial.judge_kv(serve(material)))
            windows += 1
        done += len(chosen)
        index += 1
        if done >= ENOUGH and np.concatenate([one.right for one in judged["reprefill"]]).mean() < ANSWERS:
            break
    if not done:
        return Asked(setup, 0, 0, bootstrap([]), ())
    joined = {name: _joined(rows) for name, rows in judged.items()}
    rows = tuple(row(name, joined[name], joined[SOUND], joined[BLIND]) for name in arms)
    return Asked(setup, done, windows, bootstrap(joined["reprefill"]["right"].tolist()), rows)


def row(arm: str, found: dict[str, Items], sound: dict[str, Items], blind: dict[str, Items]) -> Row:
    """An arm's row from what it, the sound arm and blind reuse answered to the same questions."""
    lost = bootstrap((sound["agree"] - found["agree"]).tolist())
    excess = bootstrap((found["kl"] - sound["kl"]).tolist())
    seen = "decisions" if lost.low > MARGIN else "likelihood" if excess.low > MARGIN else ""
    return Row(
        arm,
        len(found["kl"]),
        bootstrap(found["right"].tolist()),
        bootstrap(found["kl"].tolist()),
        eta_interval(found["kl"], blind["kl"]),
        lost,
        excess,
        seen,
    )


def _joined(rows: list[Judged]) -> dict[str, Items]:
    return {key: np.concatenate([getattr(one, key) for one in rows]) for key in ("right", "agree", "kl")}
