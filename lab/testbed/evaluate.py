"""Measure a backbone: `python -m lab.testbed.evaluate --family gqa --output metrics.json`.

All episodes come from worlds that training never drew from (`TRAINING_SEEDS`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kamera.testbed.video import read_frames, render_video
from kamera.testbed.world import Episode, World
from lab.speed.machine import machine

from .batches import Batch, hide_from_questions, isolate
from .directories import BACKBONES, UNLED, family_of, load
from .families import family
from .frontend import SYSTEM_PROMPTS
from .regimes import RepeatingWorld
from .scoring import MaskOf, accuracy, some_questions

HELD_OUT = 424_242
LAYOUTS = ("LI", "LLI", "LRI", "LLRI", "LRLI", "LPLRI", "LLRB", "LLIR", "LIRI", "lri", "llri", "LlRi", "lLrI")
"""Windows that are measured: pictures, large items frames (B), text twins (small letters), mixed."""
UNLED_LAYOUTS = ("I", "LI", "LLI", "LLLI", "LLLLI", "LPLI", "LLIL", "LIJ", "LLIJ")
"""The same of the unled backbones: what they were shown in training, on other worlds."""
ORDER_LAYOUTS = ("LLI", "LLLI")
"""Windows in which unled backbones are asked for the order of legends."""


def others(batch: Batch) -> list[int]:
    """The frames that show no items."""
    return [i for i, frame in enumerate(batch.frames) if not frame.shows_items]


def items(batch: Batch) -> list[int]:
    """The frames that show items."""
    return [i for i, frame in enumerate(batch.frames) if frame.shows_items]


VIEWS: dict[str, MaskOf] = {
    "full": lambda batch: batch.mask,
    "evicted": lambda batch: hide_from_questions(batch, others(batch)),
    "blind": lambda batch: isolate(batch, items(batch)),
    "blind_evicted": lambda batch: isolate(batch, items(batch)) & hide_from_questions(batch, others(batch)),
}
"""Full; evicted (the questions see the items frames only, whose KV has absorbed the others); blind (the items
frames have absorbed nothing, everything is in view); both."""


def by_layout(
    name: str, model: Any, tokenizer: Any, episodes: int, layouts: Sequence[str] = LAYOUTS
) -> dict[str, Any]:
    """Accuracy by question kind in windows of several shapes, in each of `VIEWS`."""
    of = family(family_of(name))
    table = {}
    for layout in tqdm(layouts, desc=f"{name}: layouts"):
        shown = [RepeatingWorld(HELD_OUT).episode(i, layout=layout) for i in range(episodes)]
        table[layout] = accuracy(of, model, tokenizer, shown, VIEWS)
    return table


def by_order(name: str, model: Any, tokenizer: Any, episodes: int) -> dict[str, Any]:
    """Accuracy of questions about the order of legends, everything in view: `{layout: {kind: …}}`."""
    of, view = family(family_of(name)), {"full": VIEWS["full"]}
    table: dict[str, Any] = {}
    for layout in ORDER_LAYOUTS:
        shown = [RepeatingWorld(HELD_OUT).episode(i, layout=layout) for i in range(episodes)]
        # a kind at a time: packed questions are of one length
        for kind in ("ago", "earlier"):
            found = accuracy(of, model, tokenizer, shown, view, kinds=(kind,), shares=(1.0,))
            table.setdefault(layout, {})[kind] = {"n": found["n"][kind], "accuracy": found["full"][kind]}
    return table


@torch.no_grad()
def chat_answers(
    model: Any, processor: Any, images: list[Any], episode: Episode, texts: list[str]
) -> list[str]:
    """`model.generate` through chat template and image processor, one question at a time."""
    chunks = [
        part
        for image, frame in zip(images, episode.frames, strict=True)
        for part in ({"type": "image", "image": image}, {"type": "text", "text": frame.caption})
    ]
    answers = []
    for text in texts:
        messages = [
            {"role": "system", "content": SYSTEM_PROMPTS[0]},
            {"role": "user", "content": [*chunks, {"type": "text", "text": text}]},
        ]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = processor(images=images, text=prompt, return_tensors="pt")
        ids = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(ids, skip_special_tokens=True))
    return answers


def video_agreement(
    model: Any, processor: Any, episodes: int, questions: int = 8, layout: str = "LLRI"
) -> dict[str, Any]:
    """Generated answers on pictures and on the same pictures out of an mp4, against the truth."""
    rng = np.random.default_rng(3)
    right, through_video, same = [], [], []
    for index in tqdm(range(episodes), desc="video"):
        episode = World(HELD_OUT + 3).episode(index, layout=layout)
        kinds = ("value", "glyph", "colour")
        asked = some_questions(episode, questions, rng, kinds, (0.5, 0.25, 0.25))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "frames.mp4"
            render_video(episode.frames, path)
            decoded = read_frames(path)
        texts, truth = [one.text for one in asked], [one.answer for one in asked]
        drawn = [frame.image for frame in episode.frames]
        clean = chat_answers(model, processor, drawn, episode, texts)
        recorded = chat_answers(model, processor, decoded, episode, texts)
        right += [a == b for a, b in zip(clean, truth, strict=True)]
        through_video += [a == b for a, b in zip(recorded, truth, strict=True)]
        same += [a == b for a, b in zip(clean, recorded, strict=True)]
    return {
        "n": len(same),
        "accuracy_pictures": float(np.mean(right)),
        "accuracy_video": float(np.mean(through_video)),
        "same_answer": float(np.mean(same)),
    }


def evaluate(name: str, directory: Path | None, episodes: int) -> dict[str, Any]:
    """All measurements of the model in `directory` (default: the packaged one)."""
    model, processor = load(name, directory)
    facts = {
        "family": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "chance": 1 / 16,
    }
    if name.endswith(UNLED):
        return {
            **facts,
            "layouts": by_layout(name, model, processor.tokenizer, episodes, UNLED_LAYOUTS),
            "order": by_order(name, model, processor.tokenizer, episodes),
            "video": video_agreement(model, processor, max(1, episodes // 4), layout="LLI"),
        }
    return {
        **facts,
        "layouts": by_layout(name, model, processor.tokenizer, episodes),
        # LLaVA's processor counts the tokens of all pictures by the size of the largest: it takes one size
        "video": None if name == "mha" else video_agreement(model, processor, max(1, episodes // 4)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="measure a testbed backbone")
    parser.add_argument("--family", choices=BACKBONES, default="gqa")
    parser.add_argument("--model", type=Path, default=None, help="default: the packaged one")
    parser.add_argument("--episodes", type=int, default=32, help="held-out episodes per layout")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = evaluate(options.family, options.model, options.episodes)
    command = f"python -m lab.testbed.evaluate --family {options.family} --episodes {options.episodes}"
    text = json.dumps({"command": command, "machine": machine(), **found}, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
