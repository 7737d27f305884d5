"""The training loop: steps, the held-out curve, checkpoints."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..directories import export, load
from ..evaluate import VIEWS
from ..families import Family, family
from ..frontend import build_tokenizer
from ..regimes import RepeatingWorld
from ..scoring import accuracy
from .muon import Muon
from .recipe import Recipe
from .schedule import JUDGED, Phase, Schedule
from .windows import episode


def build(of: Family, tokenizer: Any, schedule: Schedule) -> Any:
    """The backbone to start from, or a random decoder behind the family's shipped vision tower."""
    torch.manual_seed(schedule.seed)
    model = of.build(of.config(tokenizer))
    if schedule.start:
        model.load_state_dict(load(schedule.start)[0].state_dict())
        return _trained(model, schedule.vision)
    shipped = load(of.name)[0]
    taken = {
        name: value
        for name, value in shipped.state_dict().items()
        if not name.startswith(("model.language_model.", "lm_head."))
    }
    model.load_state_dict(taken, strict=False)
    return _trained(model, schedule.vision)


def _trained(model: Any, vision: bool) -> Any:
    """The model with its decoder, and with `vision` its tower, to be trained."""
    text = {id(p) for p in model.model.language_model.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(vision or id(parameter) in text)
    return model


def optimizers(model: Any, schedule: Schedule) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on the matrices of the decoder's layers, AdamW on the rest of what is trained."""
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    layers = {id(p) for p in model.model.language_model.layers.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and id(parameter) in layers else rest).append(parameter)
    return (
        Muon(matrices, lr=schedule.muon),
        torch.optim.AdamW(rest, lr=schedule.adamw, betas=(0.9, 0.98), weight_decay=0.01),
    )


def curve(of: Family, model: Any, tokenizer: Any, schedule: Schedule) -> dict[str, Any]:
    """Held-out accuracy by layout: everything in view, legends evicted, items blind and legends evicted."""
    masks = {name: VIEWS[name] for name in ("full", "evicted", "blind_evicted")}
    model.eval()
    scores = {}
    for layout in schedule.watched:
        shown = [
            RepeatingWorld(0).episode(index, layout=layout)
            if schedule.judged is None
            else episode(np.random.default_rng([0, index]), layout, schedule.judged)
            for index in range(schedule.episodes)
        ]
        found = accuracy(of, model, tokenizer, shown, masks, batch_size=1 if schedule.judged else len(shown))
        scores[layout] = {
            "n": found["n"],
            **{view: {kind: round(found[view][kind], 4) for kind in sorted(found[view])} for view in masks},
        }
    return scores


SAVED = 20
"""Steps that are lost at most when a run is killed."""


class Run:
    """A run in a folder: `checkpoint.pt`, `best.pt` of the phase, `training.json`."""

    def __init__(self, out: Path, schedule: Schedule) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.schedule = out, schedule
        self.of, self.tokenizer = family(schedule.family), build_tokenizer()
        self.model = build(self.of, self.tokenizer, schedule)
        self.muon, self.adamw = optimizers(self.model, schedule)
        self.recipe = Recipe(self.of, self.model, self.tokenizer, schedule)
        self.step, self.seconds, self.skipped, self.best = 0, 0.0, 0, -1.0
        self.history: list[dict[str, Any]] = []
        if (out / "checkpoint.pt").exists():
            self._resume()

    def save(self, name: str = "checkpoint") -> None:
        """Write weights, optimizers and progress; what was there before stays until it is done."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        state = {
            "weights": trained,
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "progress": [self.step, self.seconds, self.skipped, self.best],
        }
        torch.save(state, self.out / f"{name}.new")
        os.replace(self.out / f"{name}.new", self.out / f"{name}.pt")

    def _restore(self, name: str) -> list[Any]:
        state = torch.load(self.out / f"{name}.pt", weights_only=True)
        self.model.load_state_dict(state["weights"], strict=False)
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        return list(state["progress"])

    def _resume(self) -> None:
        self.step, self.seconds, self.skipped, self.best = self._restore("checkpoint")
        if (report := self.out / "training.json").exists():
            history = json.loads(report.read_text())["history"]
            self.history = [entry for entry in history if entry["step"] <= self.step]

    def advance(self) -> dict[str, float]:
        """One step; its losses."""
        phase = self.schedule.phase(self.step + self.skipped)
        pace = self.schedule.pace(self.step + self.skipped)
        self.muon.param_groups[0]["lr"] = self.schedule.muon * pace
        self.adamw.param_groups[0]["lr"] = self.schedule.adamw * pace
        self.model.train()
        generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + self.step)
        loss, parts = self.recipe.loss(self.recipe.draw(self.step, phase), generator)
        self.muon.zero_grad()
        self.adamw.zero_grad()
        loss.backward()
        self.muon.step()
        self.adamw.step()
        self.step += 1
        return parts

    def score(self, parts: dict[str, float]) -> None:
        """A point of the curve, a checkpoint, and the end of a phase whose LLI fell."""
        phase = self.schedule.phase(self.step - 1 + self.skipped)
        scores = curve(self.of, self.model, self.tokenizer, self.schedule)
        reached = scores[JUDGED]["evicted"].get("2 hops", 0.0)
        losses = {name: round(value, 4) for name, value in parts.items()}
        entry = {
            "step": self.step,
            "phase": phase.name,
            "seconds": round(self.seconds),
            "losses": losses,
            **scores,
        }
        self.history.append(entry)
        if reached >= self.best:
            self.best = reached
            self.save("best")
        elif reached < self.best - self.schedule.fall and phase is not self.schedule.phases[-1]:
            self._end_phase(phase)
        self.save()
        report = {**asdict(self.schedule), "skipped": self.skipped, "history": self.history}
        (self.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
        brief = {layout: scores[layout]["evicted"].get("2 hops") for layout in scores}
        print(json.dumps({"step": self.step, "seconds": entry["seconds"], **losses, "evicted": brief}))

    def _end_phase(self, phase: Phase) -> None:
        self._restore("best")
        into = self.step + self.skipped
        for one in self.schedule.phases:
            into -= one.steps
            if one is phase:
                break
        self.skipped -= into
        self.history[-1]["ended"] = phase.name


def train(out: Path, schedule: Schedule, *, limit: int | None = None) -> Run:
    """Train, or go on from the checkpoint in `out`, to the end of the schedule or for `limit` steps.

    At the end of the schedule the model lies in `out/model`, in float16.
    """
    run = Run(out, schedule)
    stop = schedule.steps if limit is None else limit
    while run.step + run.skipped < schedule.steps and run.step < stop:
        started = time.perf_counter()
        parts = run.advance()
        run.seconds += time.perf_counter() - started
        if run.step % 10 == 0:
            shown = {name: round(value, 3) for name, value in parts.items()}
            print(f"{run.step} {run.seconds:.0f} s {shown}", flush=True)
        if run.step % schedule.every == 0 or run.step + run.skipped == schedule.steps:
            run.score(parts)
        elif run.step % SAVED == 0:
            run.save()
    if run.step + run.skipped == schedule.steps:
        export(run.model, schedule.family, out / "model", torch.float16)
    return run
