"""Training of the tower: every square's embedding, and on the way there the characters under each patch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.screen_reader.screens import (
    CHARACTERS,
    COLOURS,
    LEVELS,
    PATCH,
    SLICE,
    Items,
    Painter,
    Screen,
    pixels,
)
from benchmarks.screen_reader.tower import WIDTH, Tower

SLICES = PATCH // SLICE
SCALE = 14
"""Of the cosines in the loss: so small that they must come near 1, as the language model will need."""
PASS = (0.8, 0.8)
"""Share of words read at which screens become freer, by level."""


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal, in float32; its rate is on AdamW's scale."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                mean = state.setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                way = _orthogonal(weight.grad.lerp(mean, group["momentum"]))
                weight.mul_(1 - 0.02 * group["lr"])
                weight.add_(way, alpha=-0.2 * group["lr"] * max(weight.shape) ** 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


@dataclass
class Targets:
    """What squares should become: the language model's embedding of each text that can stand in one."""

    items: Items
    table: torch.Tensor  # [texts, 576]
    index: dict[str, int] = field(init=False)
    near: torch.Tensor = field(init=False)  # [576, texts], unit columns

    def __post_init__(self) -> None:
        self.index = {text: number for number, text in enumerate(self.items.texts)}
        self.near = F.normalize(self.table, dim=1).T.contiguous()

    def of(self, screens: Iterable[Screen]) -> torch.Tensor:
        """Indices of all squares, [squares]."""
        rows = [row for screen in screens for row in screen.texts]
        return torch.tensor([self.index[text] for row in rows for text in row])

    def read(self, seen: torch.Tensor) -> torch.Tensor:
        """Indices of the texts that embeddings [squares, 576] are nearest to."""
        return (F.normalize(seen, dim=-1) @ self.near).argmax(-1)


def square_loss(targets: Targets, seen: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Of embeddings [squares, 576] that should be texts of these indices: which it is, how far from it."""
    words = len(targets.items.words)
    squares = torch.ones(len(targets.index))
    squares[words:] = 0.4  # most are easy, or empty
    scale = targets.table.norm(dim=1).mean() ** 2
    loss = F.cross_entropy(F.normalize(seen, dim=1) @ targets.near * SCALE, true, squares)
    far = (seen - targets.table[true]).square().sum(1) / scale
    return loss + 2 * (far * squares[true]).sum() / squares[true].sum()


def kinds(targets: Targets, found: torch.Tensor, true: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Squares read rightly, of all: those with words, with colours, with the rest, and empty ones."""
    words, end = len(targets.items.words), len(targets.index) - 1
    colours = words + len(COLOURS)
    masks = {
        "words": true < words,
        "colours": (true >= words) & (true < colours),
        "signs": (true >= colours) & (true < end),
        "empty": true == end,
    }
    right = found == true
    return {name: (int((right & mask).sum()), int(mask.sum())) for name, mask in masks.items()}


@torch.no_grad()
def score(tower: Tower, targets: Targets, painter: Painter, screens: int = 64) -> dict[str, float]:
    """Shares of squares read rightly on fresh screens, and the mean cosine of words."""
    total: dict[str, list[int]] = {}
    cosines: list[torch.Tensor] = []
    for _ in range(screens // 16):
        drawn = [painter.screen() for _ in range(16)]
        seen, true = tower(torch.from_numpy(pixels(drawn)))[0].flatten(0, 1), targets.of(drawn)
        for name, counted in kinds(targets, targets.read(seen), true).items():
            total[name] = [a + b for a, b in zip(total.get(name, [0, 0]), counted, strict=True)]
        words = true < len(targets.items.words)
        cosines.append(F.cosine_similarity(seen[words], targets.table[true[words]]))
    return {name: right / max(1, every) for name, (right, every) in total.items()} | {
        "cosine": torch.cat(cosines).mean().item()
    }


def train(
    tower: Tower,
    targets: Targets,
    out: Path,
    *,
    minutes: float,
    batch: int,
    peak: float,
    seed: int,
    level: int = 0,
) -> Tower:
    """Train ``tower`` for so many minutes; the running mean of its weights, which reads best.

    ``out`` gets that mean and a line of what was read every minute.
    """
    letters = nn.Linear(WIDTH, SLICES * (len(CHARACTERS) + 1))
    if (out / "letters.pt").exists():
        letters.load_state_dict(torch.load(out / "letters.pt", weights_only=True))
    matrices = [p for layer in tower.vision_model.encoder.layers for p in layer.parameters() if p.dim() == 2]
    known = {id(p) for p in matrices}
    others = [p for p in (*tower.parameters(), *letters.parameters()) if id(p) not in known]
    optimizers = [Muon(matrices, peak), torch.optim.AdamW(others, peak, betas=(0.9, 0.98), weight_decay=0.01)]
    mean = AveragedModel(tower, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    words = len(targets.items.words)
    slices = torch.ones(len(CHARACTERS) + 1)
    slices[0] = 0.1  # most are empty
    painter = Painter(targets.items, 1_000_000 + seed, LEVELS[level])
    start, last, step, recent = time.monotonic(), 0.0, 0, 0.0
    while (spent := (time.monotonic() - start) / 60) < minutes:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = peak * max(0.01, min((step + 1) / 40, 1 - spent / minutes))
        drawn = [painter.screen(0.6 if number % 8 == 0 else 1.0, words=0.35) for number in range(batch)]
        seen, between = tower(torch.from_numpy(pixels(drawn)))
        seen, true = seen.flatten(0, 1), targets.of(drawn)
        loss = square_loss(targets, seen, true)
        under = torch.from_numpy(np.stack([screen.characters for screen in drawn])).unflatten(2, (-1, SLICES))
        spelled = letters(between).unflatten(-1, (SLICES, -1)).flatten(0, 2)
        loss = loss + 0.5 * F.cross_entropy(spelled, under.flatten(), slices)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        mean.update_parameters(tower)
        step += 1
        shown = true < words
        recent = 0.95 * recent + 0.05 * (targets.read(seen[shown]) == true[shown]).float().mean().item()
        if level + 1 < len(LEVELS) and recent > PASS[level]:
            level, recent = level + 1, 0.0
            painter.style = LEVELS[level]
        if time.monotonic() - last > 60 or spent + 0.05 > minutes:
            last = time.monotonic()
            row: dict[str, Any] = {
                "minute": round(spent, 1),
                "step": step,
                "level": level,
                "loss": round(loss.item(), 3),
            }
            row["words"] = round(recent, 3)
            fresh = Painter(targets.items, step, painter.style)
            row["mean"] = {
                n: round(v, 3) for n, v in score(cast(Tower, mean.module), targets, fresh, 16).items()
            }
            with (out / "training.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            for name, module in (("tower.pt", mean.module), ("letters.pt", letters)):
                torch.save(module.state_dict(), out / f"{name}.part")
                (out / f"{name}.part").rename(out / name)
    return cast(Tower, mean.module)
