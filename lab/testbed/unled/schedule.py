"""What is shown at which step, and how fast is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from .windows import LARGE, SMALL, WIDE, Size


@dataclass(frozen=True)
class Phase:
    """`steps` steps on windows of these layouts, drawn by weight, of one size.

    `order` are the kinds of questions about the order of frames that are asked beside the others.
    """

    name: str
    steps: int
    layouts: tuple[tuple[str, float], ...]
    size: Size | None = None
    order: tuple[str, ...] = ()


PHASES = (
    Phase("small", 200, (("I", 0.06), ("LI", 0.44), ("LLI", 0.5)), SMALL),
    Phase("full", 400, (("I", 0.05), ("LI", 0.2), ("LLI", 0.4), ("LLLI", 0.25), ("LLLLI", 0.1))),
    Phase(
        "long",
        650,
        (
            *(("I", 0.04), ("LI", 0.1), ("LLI", 0.2), ("LLLI", 0.25), ("LLLLI", 0.2)),
            *(("LIJ", 0.04), ("LLIJ", 0.05), ("LILJ", 0.03), ("LPLI", 0.03), ("LLIL", 0.05), ("LLL", 0.04)),
        ),
        order=("ago", "earlier"),
    ),
)

WIDER = (
    Phase(
        "wider",
        320,
        (
            *(("LI", 0.06), ("LLI", 0.12), ("LLLI", 0.1), ("LB", 0.16), ("LLB", 0.2)),
            *(("LRI", 0.18), ("LLRI", 0.12), ("LLRB", 0.06)),
        ),
    ),
)
"""What a trained backbone is shown when it goes on: large items frames (256 tokens), renames (three hops)."""

LARGER = (
    Phase("576 tokens", 40, (("LI", 0.2), ("LLI", 0.4), ("LLLI", 0.3), ("LLLLI", 0.1)), WIDE),
    Phase("1,444 tokens", 36, (("LI", 0.5), ("LLI", 0.4), ("LLLI", 0.1)), LARGE),
)
"""What it is shown for pictures as large as screenshots, half of which say nothing."""


JUDGED = "LLI"
"""The layout that says whether a phase still helps."""


@dataclass(frozen=True)
class Schedule:
    """Length and pace of a run: warm-up, then the peak, then a straight line down over the last `decay`.

    `muon` steps the decoder's matrices, `adamw` everything else. Every `every` steps `episodes` held-out
    windows of each of the layouts `watched` are asked; a phase ends early, at its best weights, when
    evicted two hops in `JUDGED` fell by `fall` below their best. With a `start` the run goes on from that
    trained backbone; with `vision` its tower is trained, too. A step has `least` windows at least, and
    the held-out ones are of the size `judged` (None: the world's own).
    """

    family: str = "gqa"
    seed: int = 0
    muon: float = 0.017
    adamw: float = 3e-3
    warmup: int = 40
    decay: float = 0.4
    every: int = 100
    fall: float = 0.12
    tokens: int = 4200
    phases: tuple[Phase, ...] = PHASES
    watched: tuple[str, ...] = ("LI", "LLI", "LLLI", "LLLLI")
    episodes: int = 10
    start: str = ""
    vision: bool = False
    least: int = 3
    judged: Size | None = None

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def pace(self, step: int) -> float:
        """The share of the peak rate at a step."""
        left = (self.steps - step) / (self.decay * self.steps)
        return min(1.0, (step + 1) / self.warmup, max(0.02, left))

    def phase(self, step: int) -> Phase:
        """The phase a step belongs to."""
        left = step
        for one in self.phases:
            if left < one.steps:
                return one
            left -= one.steps
        raise ValueError(f"step {step} lies behind the last of {self.steps}")


def wider(family: str, seed: int) -> Schedule:
    """The schedule of `WIDER`, from the family's unled backbone on, at a third of its pace."""
    return Schedule(
        family,
        seed,
        muon=0.006,
        adamw=1e-3,
        every=80,
        phases=WIDER,
        watched=("LLI", "LLB", "LRI", "LLRI"),
        start=f"{family}-unled",
        vision=True,
    )


def larger(family: str, seed: int) -> Schedule:
    """The schedule of `LARGER`, from the family's unled backbone on, at a quarter of its pace."""
    return Schedule(
        family,
        seed,
        muon=0.004,
        adamw=8e-4,
        warmup=20,
        every=100,
        phases=LARGER,
        watched=("LLI",),
        episodes=1,
        start=f"{family}-unled",
        least=1,
        judged=LARGE,
    )
