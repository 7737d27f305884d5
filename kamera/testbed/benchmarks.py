"""Data sets of the synthetic world in the layouts of MM-NIAH and MileBench.

The trained backbone can answer them, so a benchmark runs completely: from files to a table with a gap and its
repair. One-hop questions need one frame and survive blind reuse; multi-hop ones bind a frame to its
antecedents. Equal arguments give equal files, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .frames import CELL
from .world import Episode, Question, World

HELD_OUT = 800_000
"""Seed of the episodes; the backbone was trained on seeds from a million on."""


@dataclass(frozen=True)
class _EpisodeFiles:
    """One episode on disk: its frames' files, relative to the image folder, and the questions."""

    episode: Episode
    files: list[str]
    one_hop: list[Question]
    multi_hop: list[Question]


def write_mm_niah(
    folder: Path | str,
    *,
    episodes: int = 4,
    questions: int = 4,
    layouts: Sequence[str] = ("LLI", "LLLI"),
    seed: int = 0,
) -> Path:
    """Write ``mm_niah_val/``: ``retrieval-text`` (one hop) and ``reasoning-text`` (several).

    ``questions`` of each for every episode; returns ``folder``.
    """
    top = Path(folder) / "mm_niah_val"
    lines: dict[str, list[str]] = {"retrieval-text": [], "reasoning-text": []}
    for entry in _write_episodes(top / "images", "world", episodes, questions, layouts, seed):
        for name, group in (("retrieval-text", entry.one_hop), ("reasoning-text", entry.multi_hop)):
            for question in group:
                record = _mm_niah_record(len(lines[name]), entry, question, name)
                lines[name].append(json.dumps(record) + "\n")
    (top / "annotations").mkdir(parents=True, exist_ok=True)
    for name, rows in lines.items():
        (top / "annotations" / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    return Path(folder)


def write_milebench(
    folder: Path | str,
    *,
    episodes: int = 4,
    questions: int = 4,
    layouts: Sequence[str] = ("LLI", "LLLI"),
    seed: int = 0,
) -> Path:
    """Write ``MileBench/``: ``ImageNeedleInAHaystack`` (one hop) and ``MMCoQA`` (several).

    ``questions`` of each for every episode; returns ``folder``.
    """
    top = Path(folder) / "MileBench"
    data: dict[str, list[dict[str, Any]]] = {"ImageNeedleInAHaystack": [], "MMCoQA": []}
    for name, samples in data.items():
        for entry in _write_episodes(top / name / "images", "", episodes, questions, layouts, seed):
            group = entry.one_hop if name == "ImageNeedleInAHaystack" else entry.multi_hop
            samples += [_milebench_record(len(samples) + i, entry, q) for i, q in enumerate(group)]
        head = {
            "dataset": name,
            "split": "core",
            "num_sample": len(samples),
            "task_instruction": [""],  # the backbone reads questions, not instructions
            "question_type": "open-ended",
        }
        text = json.dumps({"meta_data": head, "data": samples}, indent=1)
        (top / name / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return Path(folder)


def _write_episodes(
    images: Path, subfolder: str, episodes: int, questions: int, layouts: Sequence[str], seed: int
) -> Iterator[_EpisodeFiles]:
    (images / subfolder).mkdir(parents=True, exist_ok=True)
    world = World(HELD_OUT + seed)
    for index in range(episodes):
        episode = world.episode(index, layout=layouts[index % len(layouts)])
        files = []
        for number, frame in enumerate(episode.frames):
            files.append(str(Path(subfolder) / f"{index}-{number}.png"))
            frame.image.save(images / files[-1])
        rng = np.random.default_rng([HELD_OUT + seed, index])
        pool = [episode.ask(*subject) for subject in episode.subjects()]
        shuffle = [pool[i] for i in rng.permutation(len(pool))]
        one_hop = [q for q in shuffle if q.hops == 1][:questions]
        # a default value needs only one frame: nothing is bound
        multi_hop = [q for q in shuffle if q.hops > 1 and len(q.frames) > 1][:questions]
        yield _EpisodeFiles(episode, files, one_hop, multi_hop)


def _mm_niah_record(number: int, entry: _EpisodeFiles, question: Question, name: str) -> dict[str, Any]:
    frames = entry.episode.frames
    # MM-NIAH puts the caption's newline between context and question
    context = "".join(f"<image>{frame.caption}" for frame in frames).removesuffix("\n")
    tokens = sum((f.image.width // CELL) * (f.image.height // CELL) for f in frames)
    words = len(context.replace("<image>", " ").split())
    return {
        "id": number,
        "images_list": entry.files,
        "context": context,
        "question": question.text,
        "answer": question.answer,
        "meta": {
            "placed_depth": [round(frame / len(frames), 3) for frame in question.frames],
            "context_length": tokens + words,
            "context_length_text": words,
            "context_length_image": tokens,
            "num_images": len(frames),
            "needles": [entry.files[frame] for frame in question.frames],
            "choices": None,
            "choices_image_path": None,
            "category": "find-text" if name == "retrieval-text" else "infer-choose",
        },
    }


def _milebench_record(number: int, entry: _EpisodeFiles, question: Question) -> dict[str, Any]:
    frames = entry.episode.frames
    context = "".join(f"{{image#{i}}}{frame.caption}" for i, frame in enumerate(frames, 1))
    return {
        "sample_id": number,
        "task_instruction_id": 0,
        "task_instance": {"context": context + question.text, "images_path": entry.files},
        "response": question.answer,
        "image_quantity_level": "Few" if len(frames) < 6 else "Medium",
    }
