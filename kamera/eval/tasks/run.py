"""Run a benchmark: every arm answers every item through a real window; resumable."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kamera.backbones import Backbone, Chunk
from kamera.backbones.video import Clip
from kamera.errors import EmptyChunk, NotRelocatable, TaskDataError, UnreadableMedia
from kamera.eval.tasks.arms import BLIND, REFERENCE, Arm, Cost, Windows, parse_arms
from kamera.eval.tasks.first_token import FirstToken
from kamera.eval.tasks.journal import Journal, Line
from kamera.eval.tasks.report import Results, collect
from kamera.eval.tasks.sample import Answered, Part, Picture, Problem, Sample, Task, Text
from kamera.window.anchor import anchor_ids

ARMS = (REFERENCE, BLIND, "patch@16")
UNANSWERED = "None"
"""What an item is answered that does not fit (the benchmarks' own convention)."""


def run_task(
    backbone: Backbone,
    task: Task,
    data: str | Path,
    out_dir: str | Path,
    *,
    arms: Sequence[str] = ARMS,
    limit: int | None = None,
    max_tokens: int | None = None,
    system: str | None = None,
    resume: bool = True,
    on_item: Callable[[], None] = lambda: None,
) -> Results:
    """Ask every sample of ``task`` in ``data`` under every arm, greedily, and score the answers.

    Chunks are a sample's images, clips and the text between them; the antecedents of each are what
    stands before it. Lines, predictions and settings are kept in ``out_dir``; a second run with the
    same settings answers only what is missing there. ``limit`` bounds the samples of each annotation
    file, ``max_tokens`` (default: what the model was made for) the prompt, ``system`` is the system
    prompt. ``on_item`` is called after each sample.

    Raises ValueError for an unknown arm, TaskDataError for data that is not laid out as published and
    for a folder of another run (model, arms, settings, data). What is wrong with single samples is
    in the result's ``problems``.
    """
    data, out_dir = Path(data), Path(out_dir)
    wanted = parse_arms(arms)
    room = _room(backbone) if max_tokens is None else max_tokens
    settings = {
        "task": task.name,
        "arms": [arm.name for arm in wanted],
        "backbone": backbone.fingerprint,
        "system": system,
        "max_tokens": room,
    }
    journal = Journal(out_dir, settings, resume)
    asking = _Asking(backbone, task, wanted, system, room)
    problems: list[Problem] = []
    answered: dict[str, list[Answered]] = {arm.name: [] for arm in wanted}
    lines: list[Line] = []
    for item in _once(task.load(data, limit)):
        if isinstance(item, Problem):
            problems.append(item)
            continue
        missing = _missing(journal, item, wanted)
        try:
            held = journal.lines.get((item.id, REFERENCE))
            for line in asking.lines(item, missing, held) if missing else ():
                journal.add(line)
        except (UnreadableMedia, EmptyChunk, NotRelocatable) as error:
            problems.append(Problem(item.where, str(error)))
            continue
        kept = replace(item, parts=tuple(_without_media(part) for part in item.parts))
        for arm in wanted:
            line = journal.lines[item.id, arm.name]
            lines.append(line)
            answered[arm.name].append(Answered(kept, line.response, line.score))
        on_item()
    for name, of_arm in answered.items():
        folder = out_dir / "predictions" / name
        folder.mkdir(parents=True, exist_ok=True)
        task.write_predictions(of_arm, folder)
    return collect(task, answered, lines, problems)


class _Asking:
    """Asks samples of one run's arms."""

    def __init__(
        self, backbone: Backbone, task: Task, arms: Sequence[Arm], system: str | None, room: int | None
    ) -> None:
        self.backbone = backbone
        self.task = task
        self.system = system
        self.rank = max((arm.rank or 0 for arm in arms), default=0)
        self.room = room
        self.around = anchor_ids(backbone, system).shape[0]

    def lines(self, sample: Sample, arms: Sequence[Arm], reference: Line | None = None) -> Iterator[Line]:
        """One line for each arm, the re-prefill's first: others are compared with it (``reference`` is
        its line where it has one). Blind goes before patches, which would serve it once stored.
        """
        chunks, question, note = self._fitted(sample)
        if chunks is None:
            yield from (self._line(sample, arm, UNANSWERED, note) for arm in arms)
            return
        tokens = question + sum(chunk.num_tokens for chunk in chunks)
        left = sorted(arms, key=lambda arm: (arm.name != REFERENCE, arm.rank or 0))
        first = None if reference is None else _first_token(reference)
        try:
            windows = Windows(self.backbone, chunks, self.system)
            while left:
                arm = left[0]
                window, cost = windows.window(arm, self.rank)
                started = time.perf_counter()
                said = window.generate(
                    sample.question, max_new_tokens=self.task.max_new_tokens(sample), do_sample=False
                )
                seconds = time.perf_counter() - started
                logits = window.next_token_logits(sample.question)
                first = FirstToken.of(logits) if arm.name == REFERENCE else first
                # the benchmarks' own runs strip what is generated; their scorers count on it
                yield replace(
                    self._line(sample, arm, said.strip(), note, cost, seconds),
                    tokens=tokens,
                    first_token_kl=None if first is None else first.kl(logits),
                    first_token=asdict(first) if first and arm.name == REFERENCE else None,
                )
                left.pop(0)
        except torch.OutOfMemoryError:
            for arm in left:
                yield self._line(sample, arm, UNANSWERED, "out of memory")

    def _line(
        self,
        sample: Sample,
        arm: Arm,
        response: str,
        note: str,
        cost: Cost | None = None,
        answer_seconds: float = 0.0,
    ) -> Line:
        score = None if sample.answer is None else self.task.score(response, sample)
        line = Line(sample.id, arm.name, digest(sample), response, score, note=note)
        if cost is None:
            return line
        return replace(
            line,
            seconds=cost.seconds,
            answer_seconds=answer_seconds,
            forwards=cost.forwards,
            tokens_recomputed=cost.tokens_recomputed,
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
        )

    def _fitted(self, sample: Sample) -> tuple[list[Chunk] | None, int, str]:
        """Chunks that fit (None if that cannot be), the question's length, and a note."""
        chunks = [self.backbone.chunk(_content(part)) for part in sample.parts]
        question = self.backbone.tokenize(sample.question).shape[0]
        if self.room is None:
            return chunks, question, ""
        free = self.room - self.around - question - self.task.max_new_tokens(sample)
        over = sum(chunk.num_tokens for chunk in chunks) - free
        if over <= 0:
            return chunks, question, ""
        cut = sample.head
        while self.task.overlong == "left" and over > 0 and cut < len(chunks):
            over -= chunks[cut].num_tokens
            cut += 1
        if over > 0:
            return None, question, "over-length"
        return chunks[: sample.head] + chunks[cut:], question, "cut"


def _first_token(line: Line) -> FirstToken | None:
    kept = line.first_token
    return kept and FirstToken(tuple(kept["ids"]), tuple(kept["log_probs"]), kept["rest"])


def digest(sample: Sample) -> str:
    """What an answer depends on besides the model: prompt, media (name and size), label."""
    said = [sample.id, sample.prompt, repr(sample.answer), [_name(part) for part in sample.parts]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _name(part: Part) -> list[Any]:
    if isinstance(part, Text):
        return []
    options = [] if isinstance(part, Picture) else [part.num_frames, part.fps]
    if isinstance(part.source, str | Path):
        path = Path(part.source)
        return [path.name, path.stat().st_size if path.is_file() else None, *options]
    return [type(part.source).__name__, *options]


def _without_media(part: Part) -> Part:
    """What predictions are written from: a long run must not keep every decoded clip."""
    return part if isinstance(part, Text) else replace(part, source=None)


def _content(part: Part) -> Any:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Picture):
        return {"type": "image", "image": part.source}
    sampling = {} if isinstance(part.source, Clip) else {"num_frames": part.num_frames, "fps": part.fps}
    return {"type": "video", "video": part.source, **sampling}


def _missing(journal: Journal, sample: Sample, arms: Sequence[Arm]) -> list[Arm]:
    """Arms without a line. Raises TaskDataError when a line answers another version of the sample."""
    held = {arm: journal.lines.get((sample.id, arm.name)) for arm in arms}
    wanted = digest(sample)
    for line in held.values():
        if line is not None and line.digest != wanted:
            raise TaskDataError(
                f"{sample.where}: {sample.id} is not what {journal.path} holds answers to (its prompt, "
                "images or label changed): give another folder"
            )
    return [arm for arm, line in held.items() if line is None]


def _once(items: Iterator[Sample | Problem]) -> Iterator[Sample | Problem]:
    seen: set[str] = set()
    for item in items:
        if isinstance(item, Sample):
            if item.id in seen:
                yield Problem(item.where, f"{item.id} was there before")
                continue
            seen.add(item.id)
        yield item


def _room(backbone: Backbone) -> int | None:
    """How many tokens the model was made for, or serves at all."""
    limit = None if backbone.limit is None else backbone.limit.below
    bounds = [b for b in (getattr(backbone.config, "max_position_embeddings", None), limit) if b]
    return min(bounds) if bounds else None
