"""Arms: ways to serve a chunk in a scene, their honest price, and their names.

An arm gives the target's KV at its place; what it must store beyond the canonical, and what it
recomputes, it says itself. Budgets are bytes: ``name@m`` may store what a plain rank-``m`` patch over all
layers and channels does (`Scene.budget`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kamera.engines.hf import forwards
from kamera.ops import KV
from lab.masked import prefill_hiding
from lab.scene import Scene


@dataclass(frozen=True, eq=False)
class Served:
    """The target's KV at its place, and what it took.

    ``nbytes`` are stored beyond the canonical. ``tokens_recomputed`` counts tokens times the share of
    layers run for them in context; ``forwards`` the decoder forwards (whole or partial) at serving.
    """

    kv: KV
    nbytes: int
    tokens_recomputed: float = 0.0
    forwards: int = 0


class Arm(Protocol):
    """One way to serve a scene's target.

    ``per_question`` says that the KV depends on the question asked: `serve` is then called with each
    question's token ids ``[tokens]``, otherwise once per scene without one.
    """

    @property
    def name(self) -> str:
        """As `parse_arm` takes it where the arm needs nothing but a budget."""
        ...

    @property
    def per_question(self) -> bool:
        """Whether `serve` wants the question."""
        ...

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """The target's KV in ``scene``; nothing the scene holds is written."""
        ...


# -- names -----------------------------------------------------------------------------------------

_PLAIN: dict[str, Callable[[], Arm]] = {}
_BUDGETED: dict[str, Callable[[int], Arm]] = {}
_ROOMS = ("lab.repairs", "lab.baselines")
_NAME = re.compile(r"([a-z0-9][a-z0-9-]*)(?:@(.*))?")


def register(name: str, make: Callable[[], Arm]) -> None:
    """Make ``name`` an arm that stores nothing of a chosen size."""
    _PLAIN[name] = make


def register_budgeted(name: str, make: Callable[[int], Arm]) -> None:
    """Make ``name@m`` an arm; ``make`` gets ``m``, the rank of the plain patch whose bytes it may store."""
    _BUDGETED[name] = make


def known_arms() -> tuple[str, ...]:
    """Every name `parse_arm` takes; ``@m`` marks those with a budget."""
    for room in _ROOMS:
        importlib.import_module(room)
    return (*_PLAIN, *(f"{name}@m" for name in _BUDGETED))


def parse_arm(text: str) -> Arm:
    """The arm called ``text``: ``blind``, ``patch@16``. Raises ValueError naming the known arms."""
    known = ", ".join(known_arms())
    match = _NAME.fullmatch(text)
    name, budget = match.groups() if match else (text, None)
    if name in _PLAIN and budget is None:
        return _PLAIN[name]()
    if name in _BUDGETED and budget is not None and re.fullmatch(r"[1-9][0-9]*", budget):
        return _BUDGETED[name](int(budget))
    if name in _BUDGETED:
        given = "no budget" if budget is None else f"budget {budget!r}"
        raise ValueError(f"arm {text!r} has {given}: give a rank of at least 1, as in {name}@16")
    if name in _PLAIN:
        raise ValueError(f"arm {text!r} takes no budget: write {name}")
    raise ValueError(f"no arm {text!r}: known are {known}")


# -- without a patch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reprefill:
    """The reference: the target prefilled behind its antecedents."""

    name: str = "reprefill"
    per_question: bool = False

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """KV(B|A)."""
        return Served(scene.conditioned, 0, float(scene.target.num_tokens), 1)


@dataclass(frozen=True)
class Blind:
    """The canonical relocated: what every repair starts from."""

    name: str = "blind"
    per_question: bool = False

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """R(δ)·KV(B|∅)."""
        return Served(scene.blind, 0)


@dataclass(frozen=True)
class StaleRope:
    """The canonical as it lies, its phase that of its old place."""

    name: str = "stale-rope"
    per_question: bool = False

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """KV(B|∅), not turned."""
        return Served(scene.canonical, 0)


@dataclass(frozen=True)
class MaskOracle:
    """A forward at native positions in which the target cannot see its antecedents.

    Shows with nothing of Kamera's own that the deficit is conditioning, not position. The target still
    sees the anchor, from further away than its canonical does, so it equals blind reuse to rounding
    where the anchor is empty, and nearly where it is not.
    """

    name: str = "mask"
    per_question: bool = False

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """KV(B|∅) at B's place, prefilled there."""
        cache = forwards.make_cache(scene.backbone, [scene.context])
        start, stop = scene.anchor.length, scene.context_positions.shape[1]
        kv = prefill_hiding(scene.backbone, scene.encoded, scene.positions, cache, start, stop)
        return Served(kv, 0, float(scene.target.num_tokens), 1)


for _arm in (Reprefill, Blind, StaleRope, MaskOracle):
    register(_arm.name, _arm)
