"""Train a backbone from scratch: `python -m lab.testbed.train --family gqa --out DIR --seed 0`."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kamera.testbed.world import World

from .batches import hide_from_questions, isolate
from .directories import export, load
from .families import FAMILIES, family
from .frontend import build_tokenizer
from .recipe import Recipe
from .scoring import accuracy

PROGRESS_EPISODES = 24


@dataclass(frozen=True)
class Schedule:
    """Length and pace of a training run; `every` steps the model is scored and, if best, written."""

    family: str = "gqa"
    seed: int = 0
    steps: int = 1300
    peak: float = 1.5e-3
    warmup: int = 100
    every: int = 100

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then a cosine to 2 % of the peak."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(out: Path, schedule: Schedule, init: Path | None = None) -> None:
    """Write the best checkpoint and `training.json` to `out`; from random weights without `init`."""
    torch.manual_seed(schedule.seed)
    of = family(schedule.family)
    tokenizer = build_tokenizer()
    model = of.build(of.config(tokenizer))
    if init:
        model.load_state_dict(load(schedule.family, init)[0].state_dict())
    recipe = Recipe(of, model, tokenizer, schedule.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    watched = [World(0).episode(index, layout="LLRI") for index in range(PROGRESS_EPISODES)]
    masks = {
        "full": lambda batch: batch.mask,
        "evicted": lambda batch: hide_from_questions(batch, range(3)),
        "blind": lambda batch: isolate(batch, [3]),
    }
    history, started, best = [], time.time(), -1.0
    bar = tqdm(range(schedule.steps), desc=f"training {of.name}", mininterval=5)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        model.train()
        loss, parts = recipe.loss(*recipe.draw())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = {name: f"{value:.2f}" for name, value in parts.items()}
        bar.set_postfix(shown, refresh=False)
        if (step + 1) % schedule.every and step + 1 != schedule.steps:
            continue
        model.eval()
        scores = accuracy(of, model, tokenizer, watched, masks)
        history.append({"step": step + 1, "seconds": round(time.time() - started), **scores})
        tqdm.write(json.dumps(history[-1]))
        if (reached := scores["evicted"]["value"] + scores["full"]["value"]) >= best:
            best = reached
            export(model, schedule.family, out)
        report = json.dumps({**asdict(schedule), "history": history}, indent=1)
        (out / "training.json").write_text(report + "\n")


def main() -> None:
    """Command line."""
    default = Schedule()
    parser = argparse.ArgumentParser(description="train the testbed backbone")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--family", choices=list(FAMILIES), default=default.family)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--peak", type=float, default=default.peak, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="warm-up steps")
    parser.add_argument("--every", type=int, default=default.every, help="steps between scores")
    parser.add_argument("--init", type=Path, help="model directory to continue from")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(
        options.family, options.seed, options.steps, options.peak, options.warmup, options.every
    )
    train(options.out, schedule, options.init)


if __name__ == "__main__":
    main()
