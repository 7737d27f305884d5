"""Measure the bar: `python -m kamera.testbed.evaluate --output metrics.json`.

All episodes come from worlds that training never drew from (`TRAINING_SEEDS`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from . import reuse
from .batches import hide_from_questions, isolate, pack
from .frontend import SYSTEM_PROMPTS
from .scoring import accuracy, some_questions
from .video import read_frames, render_video
from .weights import load
from .world import Episode, World

HELD_OUT = 424_242
LAYOUTS = ("I", "LI", "LLI", "LLLI", "LPLLI", "LLIL", "LLILI", "LLLLLI")
RANKS = (0, 1, 2, 4, 8, 16, 32, 64)


def by_layout(model: Any, tokenizer: Any, episodes: int) -> dict[str, Any]:
    """Accuracy by question kind in windows of several shapes: full, evicted and blind."""
    masks = {
        "full": lambda batch: batch.mask,
        "evicted": lambda batch: hide_from_questions(
            batch, [i for i, frame in enumerate(batch.frames) if frame.kind == "legend"]
        ),
        "blind": lambda batch: isolate(
            batch, [i for i, frame in enumerate(batch.frames) if frame.kind == "items"]
        ),
    }
    table = {}
    for layout in tqdm(LAYOUTS, desc="layouts"):
        shown = [World(HELD_OUT).episode(i, layout=layout) for i in range(episodes)]
        table[layout] = accuracy(model, tokenizer, shown, masks)
    return table


def rank_curve(model: Any, tokenizer: Any, episodes: int, questions: int = 24) -> dict[str, Any]:
    """Two-hop accuracy with the items frame's KV blind plus a rank-m patch of its deficit."""
    rng = np.random.default_rng(1)
    hits: dict[int, list[bool]] = defaultdict(list)
    energy: dict[int, list[float]] = defaultdict(list)
    growth: list[list[float]] = []
    for first in tqdm(range(0, episodes, 8), desc="ranks"):
        group = [World(HELD_OUT + 1).episode(i) for i in range(first, min(first + 8, episodes))]
        asked = [some_questions(e, questions, rng, ("value",), (1.0,)) for e in group]
        batch = pack(model, tokenizer, group, asked, SYSTEM_PROMPTS[0])
        full = reuse.prefill(model, batch, batch.mask)
        blind = reuse.prefill(model, batch, isolate(batch, [3]))
        bound = torch.tensor([[one.bound for one in row] for row in asked])
        first_token, last_token = batch.spans[3]
        growth.append(
            [
                float((w - b)[:, :, first_token:last_token].norm() / w[:, :, first_token:last_token].norm())
                for pair_w, pair_b in zip(full.layers, blind.layers, strict=True)
                for w, b in zip(pair_w, pair_b, strict=True)
            ]
        )
        for rank in RANKS:
            layers, kept = reuse.patched(blind.layers, full.layers, batch.spans[3], rank)
            logits = reuse.ask(model, batch, layers, full.embeddings)
            hits[rank] += (logits.argmax(-1) == batch.answers)[bound].tolist()
            energy[rank].append(kept)
    deficit = np.mean(growth, axis=0).reshape(-1, 2).round(4).tolist()
    return {
        "n": len(hits[0]),
        "bound_accuracy": {str(rank): float(np.mean(hits[rank])) for rank in RANKS},
        "energy": {str(rank): round(float(np.mean(energy[rank])), 4) for rank in RANKS},
        "deficit_by_layer_key_value": deficit,
    }


def order_effect(model: Any, tokenizer: Any, episodes: int) -> dict[str, Any]:
    """Reversed legends: how many answers change, whether the model follows, how much KV moves."""
    rng = np.random.default_rng(2)
    order, changed, followed, moved = [2, 1, 0, 3], [], [], []
    for first in tqdm(range(0, episodes, 8), desc="orders"):
        group = [World(HELD_OUT + 2).episode(i) for i in range(first, min(first + 8, episodes))]
        asked = [some_questions(e, 24, rng, ("value",), (1.0,)) for e in group]
        turned = [Episode(tuple(e.frames[i] for i in order), e.index) for e in group]
        again = [[t.ask(q.kind, q.subject) for q in row] for t, row in zip(turned, asked, strict=True)]
        batches = [
            pack(model, tokenizer, shown, questions, SYSTEM_PROMPTS[0])
            for shown, questions in ((group, asked), (turned, again))
        ]
        blind = reuse.prefill(model, batches[0], isolate(batches[0], [3]))
        straight, reverse = (reuse.prefill(model, b, b.mask) for b in batches)
        logits = reuse.ask(model, batches[1], reverse.layers, reverse.embeddings)
        followed += (logits.argmax(-1) == batches[1].answers).flatten().tolist()
        changed += [
            a.answer != b.answer
            for x, y in zip(asked, again, strict=True)
            for a, b in zip(x, y, strict=False)
        ]
        low, high = batches[0].spans[3]
        for b, s, r in zip(blind.layers[1:], straight.layers[1:], reverse.layers[1:], strict=True):
            s_values, r_values, b_values = (one[1][:, :, low:high] for one in (s, r, b))
            moved.append(float((s_values - r_values).norm() / (s_values - b_values).norm()))
    return {
        "n": len(changed),
        "answers_changed": float(np.mean(changed)),
        "accuracy_reversed": float(np.mean(followed)),
        "deficit_relative_difference": round(float(np.mean(moved)), 4),
    }


@torch.no_grad()
def chat_answers(
    model: Any,
    processor: Any,
    images: list[Any],
    episode: Episode,
    texts: list[str],
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
        inputs = processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(ids, skip_special_tokens=True))
    return answers


def video_agreement(model: Any, processor: Any, episodes: int, questions: int = 8) -> dict[str, Any]:
    """Generated answers on pictures and on the same pictures out of an mp4, against the truth."""
    rng = np.random.default_rng(3)
    right, through_video, same = [], [], []
    for index in tqdm(range(episodes), desc="video"):
        episode = World(HELD_OUT + 3).episode(index)
        kinds = ("value", "glyph", "colour")
        asked = some_questions(episode, questions, rng, kinds, (0.5, 0.25, 0.25))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "frames.mp4"
            render_video(episode.frames, path)
            decoded = read_frames(path)
        texts = [one.text for one in asked]
        drawn = [frame.image for frame in episode.frames]
        clean = chat_answers(model, processor, drawn, episode, texts)
        recorded = chat_answers(model, processor, decoded, episode, texts)
        truth = [one.answer for one in asked]
        right += [a == b for a, b in zip(clean, truth, strict=True)]
        through_video += [a == b for a, b in zip(recorded, truth, strict=True)]
        same += [a == b for a, b in zip(clean, recorded, strict=True)]
    return {
        "n": len(same),
        "accuracy_pictures": float(np.mean(right)),
        "accuracy_video": float(np.mean(through_video)),
        "same_answer": float(np.mean(same)),
    }


def evaluate(directory: Path | None, episodes: int) -> dict[str, Any]:
    """All measurements of the model in `directory` (default: the packaged one)."""
    model, processor = load(directory)
    tokenizer = processor.tokenizer
    return {
        "chance": 1 / 16,
        "layouts": by_layout(model, tokenizer, episodes),
        "ranks": rank_curve(model, tokenizer, episodes),
        "order": order_effect(model, tokenizer, episodes),
        "video": video_agreement(model, processor, max(1, episodes // 4)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="measure the testbed backbone")
    parser.add_argument("--model", type=Path, default=None, help="default: the packaged one")
    parser.add_argument("--episodes", type=int, default=96, help="held-out episodes per layout")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = json.dumps(evaluate(options.model, options.episodes), indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
