"""Asks one sample under every arm: its chunks, the live ones, the answers and their costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch

from kamera.content import Chunk
from kamera.engines.hf import Backbone
from kamera.eval.tasks import native
from kamera.eval.tasks.arms import NATIVE, REFERENCE, Arm, Cost, Windows
from kamera.eval.tasks.first_token import FirstToken
from kamera.eval.tasks.journal import Line
from kamera.eval.tasks.sample import Sample, Task, digest
from kamera.eval.tasks.shrink import Shrink
from kamera.patches import anchor_ids

Reuse = Literal["context", "all"]
"""Reused part: the context, or also the live parts before the prompt's last text."""

UNANSWERED = "None"
"""Response to an item that does not fit (the benchmarks' own convention)."""


@dataclass(frozen=True)
class Prompt:
    """A sample's chunks that fit and their contents, the indices of the live ones, the question's tokens.

    Adjacent live parts are one chunk, because they arrive together, with the question.
    """

    chunks: tuple[Chunk, ...]
    contents: tuple[list[dict[str, Any]], ...]
    live: tuple[int, ...]
    question: int

    @property
    def tokens(self) -> int:
        """Tokens of chunks and question."""
        return self.question + sum(chunk.num_tokens for chunk in self.chunks)


class Asking:
    """Asks samples under arms, one by one; ``limit`` bounds anchor, prompt and answer together, in tokens."""

    def __init__(
        self,
        backbone: Backbone,
        task: Task,
        system: str | None,
        limit: int | None,
        reuse: Reuse = "context",
        shrink: Shrink | None = None,
    ) -> None:
        self.backbone = backbone
        self.task = task
        self.system = system
        self.limit = limit
        self.reuse = reuse
        self.shrink = shrink or Shrink()
        self._first: FirstToken | None = None  # of the current sample
        self.around = anchor_ids(backbone, system).shape[0]

    def lines(self, sample: Sample, arms: Sequence[Arm], reference: Line | None = None) -> Iterator[Line]:
        """One line for each arm, the re-prefill first, because the others are compared with it
        (``reference`` is its existing line). Blind reuse runs before patches, which would serve it once
        stored.

        Errors of this sample are in its lines (`Line.error`), never raised.
        """
        self._first = None if reference is None else _first_token(reference)
        left = sorted(arms, key=lambda arm: (arm.name != REFERENCE, arm.name == NATIVE, arm.rank or 0))
        try:
            prompt, note = self._fitted(sample)
            windows = None
            if prompt is not None:
                windows = Windows(self.backbone, prompt.chunks, self.system, prompt.live)
        except torch.OutOfMemoryError:
            yield from (self._line(sample, arm, UNANSWERED, "out of memory") for arm in left)
            return
        except Exception as error:
            yield from (_failed(sample, arm, error) for arm in left)
            return
        for arm in left:
            try:
                if windows is None or prompt is None:
                    line = self._line(sample, arm, UNANSWERED, note)
                elif arm.name == NATIVE:
                    line = self._native(sample, arm, prompt, note)
                elif arm.make is not None:
                    line = self._adapted(sample, arm, prompt, windows, note)
                else:
                    line = self._answer(sample, arm, prompt, windows, note)
            except torch.OutOfMemoryError:
                line = self._line(sample, arm, UNANSWERED, "out of memory")
            except Exception as error:
                line = _failed(sample, arm, error)
            yield line

    def _answer(self, sample: Sample, arm: Arm, prompt: Prompt, windows: Windows, note: str) -> Line:
        window, cost = windows.window(arm)
        started = time.perf_counter()
        text = window.generate(
            sample.question, max_new_tokens=self.task.max_new_tokens(sample), do_sample=False
        )
        seconds = time.perf_counter() - started
        logits = window.next_token_logits(sample.question)
        if arm.name == REFERENCE:
            self._first = FirstToken.of(logits)
        # the benchmarks' own runs strip the generated text, and their scorers need that
        return replace(
            self._line(sample, arm, text.strip(), note, prompt, cost),
            answer_seconds=seconds,
            first_token_kl=None if self._first is None else self._first.kl(logits),
            first_token=asdict(self._first) if self._first and arm.name == REFERENCE else None,
        )

    def _adapted(self, sample: Sample, arm: Arm, prompt: Prompt, windows: Windows, note: str) -> Line:
        assert arm.make is not None, "arms of other modules have a maker"
        started = time.perf_counter()
        limit = self.task.max_new_tokens(sample)
        answer, cost = windows.adapted(arm.make, sample.question, limit)
        return replace(
            self._line(sample, arm, answer.text.strip(), note, prompt, cost),
            answer_seconds=time.perf_counter() - started,
            first_token_kl=None if self._first is None else self._first.kl(answer.logits),
        )

    def _native(self, sample: Sample, arm: Arm, prompt: Prompt, note: str) -> Line:
        contents = [item for chunk in prompt.contents for item in chunk]
        answer = native.ask(
            self.backbone, contents, sample.question, self.system, self.task.max_new_tokens(sample)
        )
        return replace(
            self._line(sample, arm, answer.text.strip(), note),
            tokens=answer.tokens,
            live_tokens=answer.tokens,
            answer_seconds=answer.seconds,
            forwards=1,
            tokens_recomputed=answer.tokens,
            kv_bytes=answer.tokens * self.backbone.bytes_per_token,
            first_token_kl=None if self._first is None else self._first.kl(answer.logits),
        )

    def _line(
        self,
        sample: Sample,
        arm: Arm,
        response: str,
        note: str,
        prompt: Prompt | None = None,
        cost: Cost | None = None,
    ) -> Line:
        score = None if sample.answer is None else self.task.score(response, sample)
        line = Line(sample.id, arm.name, digest(sample), response, score, note=note)
        if prompt is None or cost is None:
            return line
        live = prompt.question + cost.tokens_recomputed
        return replace(
            line,
            tokens=prompt.tokens,
            seconds=cost.seconds,
            forwards=cost.forwards,
            tokens_recomputed=cost.tokens_recomputed,
            reused_tokens=prompt.tokens - live,
            live_tokens=live,
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
        )

    def _fitted(self, sample: Sample) -> tuple[Prompt | None, str]:
        """The prompt, cut to fit (None if impossible), and a note."""
        whole = self._prompt(sample)
        if self.limit is None:
            return whole, ""
        over = whole.tokens + self.around + self.task.max_new_tokens(sample) - self.limit
        if over <= 0:
            return whole, ""
        cut = sample.head
        context = len(whole.chunks) - len(whole.live) if self.task.overlong == "left" else 0
        while over > 0 and cut < context:
            over -= whole.chunks[cut].num_tokens
            cut += 1
        if over > 0:
            return None, "over-length"
        gone = cut - sample.head
        kept = (*whole.chunks[: sample.head], *whole.chunks[cut:])
        contents = (*whole.contents[: sample.head], *whole.contents[cut:])
        return Prompt(kept, contents, tuple(i - gone for i in whole.live), whole.question), "cut"

    def _prompt(self, sample: Sample) -> Prompt:
        contents: list[list[dict[str, Any]]] = []
        live: list[int] = []
        for together, parts in groupby(sample.parts, lambda part: part.live and self.reuse == "context"):
            items = [self.shrink.content(part) for part in parts]
            live += [len(contents)] * together
            contents += [items] if together else [[item] for item in items]
        chunks = tuple(map(self.backbone.chunk, contents))
        question = self.backbone.tokenize(sample.question).shape[0]
        return Prompt(chunks, tuple(contents), tuple(live), question)


def room_of(backbone: Backbone) -> int | None:
    """How many tokens the model was made for, or serves at all."""
    limit = None if backbone.limits.below is None else backbone.limits.below
    bounds = [b for b in (getattr(backbone.config, "max_position_embeddings", None), limit) if b]
    return min(bounds) if bounds else None


def _failed(sample: Sample, arm: Arm, error: Exception) -> Line:
    first = (str(error).strip().splitlines() or [""])[0]
    return Line(sample.id, arm.name, digest(sample), "", None, error=f"{type(error).__name__}: {first}")


def _first_token(line: Line) -> FirstToken | None:
    kept = line.first_token
    return None if kept is None else FirstToken(tuple(kept["ids"]), tuple(kept["log_probs"]), kept["rest"])
