"""Train the shipped backbone from scratch: ``python -m benchmarks.testbed --out DIR``.

The shipped weights are those of seed 0 and 1,000 steps, one thread (2 s a step on a core of an Intel Xeon).
DIR is a model directory that ``Backbone.from_pretrained`` takes, with ``training.json``, the scores along the
way. The table has a row for each score: the share of right answers with everything in view, with the frames
that were shown first evicted, and with an items frame that saw no other frame.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from benchmarks import report
from benchmarks.testbed import backbone
from benchmarks.testbed.batches import hide_from_questions, isolate
from benchmarks.testbed.frontend import build_processor, build_tokenizer
from benchmarks.testbed.recipe import Recipe
from benchmarks.testbed.scoring import accuracy
from kamera.testbed.world import World

PROGRESS_EPISODES = 24


@dataclass(frozen=True)
class Schedule:
    """Length and pace of a training run; every ``every`` steps the model is scored and, if best, written."""

    seed: int = 0
    steps: int = 1000
    peak: float = 1.5e-3
    warmup: int = 100
    every: int = 100

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then a cosine to 2 % of the peak."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(out: Path, schedule: Schedule, episodes: int = PROGRESS_EPISODES) -> list[report.Row]:
    """Write the best checkpoint and ``training.json`` to ``out``; the scores along the way."""
    torch.manual_seed(schedule.seed)
    tokenizer = build_tokenizer()
    model = backbone.build(tokenizer)
    recipe = Recipe(model, tokenizer, schedule.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    watched = [World(0).episode(index, layout="LLRI") for index in range(episodes)]
    masks = {
        "full": lambda batch: batch.mask,
        "evicted": lambda batch: hide_from_questions(batch, range(3)),
        "blind": lambda batch: isolate(batch, [3]),
    }
    history: list[report.Row] = []
    best = -1.0
    bar = tqdm(range(schedule.steps), desc="training", mininterval=5)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        model.train()
        loss, parts = recipe.loss(*recipe.draw())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix({name: f"{value:.2f}" for name, value in parts.items()}, refresh=False)
        if (step + 1) % schedule.every and step + 1 != schedule.steps:
            continue
        model.eval()
        scores = accuracy(model, tokenizer, watched, masks)
        history.append({"step": step + 1, **scores})
        if (reached := scores["evicted"]["value"] + scores["full"]["value"]) >= best:
            best = reached
            export(model, out)
        text = json.dumps({**asdict(schedule), "history": history}, indent=1)
        (out / "training.json").write_text(text + "\n", encoding="utf-8")
    return history


def export(model: Any, directory: Path) -> None:
    """Write model (in bfloat16) and processor as a Hugging Face model directory."""
    small = type(model)(copy.deepcopy(model.config))
    small.load_state_dict(model.state_dict())
    small.to(torch.bfloat16)
    processor = build_processor()
    small.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    small.save_pretrained(directory)
    processor.save_pretrained(directory)


def _rows(history: list[report.Row]) -> list[report.Row]:
    kinds = ("2 hops", "3 hops", "glyph")
    views = ("full", "evicted", "blind")
    return [
        {"step": row["step"], **{f"{v}, {k}": row[v].get(k) for v in views for k in kinds}} for row in history
    ]


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    default = Schedule()
    parser = report.parser("testbed", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--peak", type=float, default=default.peak, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="warm-up steps")
    parser.add_argument("--every", type=int, default=default.every, help="steps between scores")
    parser.add_argument("--episodes", type=int, default=PROGRESS_EPISODES, help="of each score")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(options, name) for name in asdict(default)}
    history = train(options.out, Schedule(**given), options.episodes)
    report.tell(options, f"Right answers by step, {options.out}", _rows(history), schedule=given)


if __name__ == "__main__":
    main()
