"""Kamera as a model of lmms-eval, so that its tasks run under reuse: ``--model kamera``.

    python -m lmms_eval --model kamera --tasks muirbench \\
        --model_args pretrained=DIR,arms=reprefill:blind:patch@16,answer=patch@16,out=runs/muirbench

Pictures and clips are the context, text is live. Every arm answers an item in one pass into ``out``;
lmms-eval scores the arm ``answer``, and a second run with another arm finds its answers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from kamera.engines.hf import Backbone
from kamera.eval.arms import arms_named
from kamera.eval.tasks.asking import TaskAsker, room_of
from kamera.eval.tasks.journal import Journal, SampleRow, locked
from kamera.eval.tasks.sample import Part, Passage, Picture, TaskSample, Video
from kamera.eval.tasks.shrink import Shrink


def manifest() -> ModelManifest:
    """The manifest for lmms-eval's entry point ``lmms_eval.models``."""
    return ModelManifest("kamera", chat_class_path="kamera.eval.lmms.Kamera")


class Kamera(lmms):  # type: ignore[misc]
    """The chat model. Colons separate ``arms``; lmms-eval scores the arm ``answer`` (default: the last).

    Greedy only. Raises ValueError for sampling, and for a conversation of several turns.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str,
        arms: str = "reprefill:blind:patch@16",
        answer: str | None = None,
        out: str = "kamera-lmms",
        device: str | None = None,
        dtype: str = "auto",
        system_prompt: str | None = None,
        num_frames: int = 8,
        max_pixels: int | None = None,
        batch_size: int | str = 1,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown or int(batch_size) != 1:
            raise ValueError(f"kamera takes batch_size=1 and no {', '.join(unknown) or 'other'}")
        self.makers = arms_named(arms.split(":"))
        self.answer = answer or list(self.makers)[-1]
        if self.answer not in self.makers:
            raise ValueError(f"answer {self.answer!r} is none of the arms {arms}")
        self.backbone = Backbone.from_pretrained(pretrained, device=device, dtype=dtype).engine
        self.device = self.backbone.device
        self.system = system_prompt
        self.frames = num_frames
        self.shrink = Shrink(max_pixels)
        self.out = Path(out)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The answers of the arm `answer`, in the order of the requests; the other arms' are in ``out``.

        A failed item has an empty answer; its line holds the error, and the next run asks it again.
        """
        settings = {
            "task": "lmms-eval",
            "backbone": self.backbone.fingerprint,
            "system": self.system,
            "frames": self.frames,
            "pictures": {"max_pixels": self.shrink.max_pixels},
        }
        with locked(self.out):
            journal = Journal(self.out, settings, asked={"arms": list(self.makers)})
            return [self._answer(journal, at, *request.args) for at, request in enumerate(requests)]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not supported."""
        raise NotImplementedError("kamera generates: choose tasks of the type generate_until")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not supported."""
        raise NotImplementedError("kamera answers one turn: choose tasks of the type generate_until")

    def _answer(
        self,
        journal: Journal,
        at: int,
        context: str,
        to_messages: Any,
        generation: Mapping[str, Any],
        doc_id: Any,
        task: str,
        split: str,
    ) -> str:
        if generation.get("do_sample") or (generation.get("temperature") or 0) > 0:
            raise ValueError(f"{task} samples its answers (temperature): kamera is greedy")
        messages = to_messages(self.task_dict[task][split][doc_id])
        sample = self._sample(f"{task}/{split}/{doc_id}", task, messages)
        if missing := journal.missing(sample, self.makers):
            journal.add_row(SampleRow.of(sample, at))
            lengths = _Lengths(int(generation.get("max_new_tokens", 128)))
            asking = TaskAsker(
                self.backbone, lengths, self.system, room_of(self.backbone), shrink=self.shrink
            )
            for trial in asking.trials(sample, missing, journal.first_token(sample.id)):
                journal.add(replace(trial, answer=_cut(trial.answer, generation.get("until") or ())))
        return journal.trials[sample.id, self.answer].answer

    def _sample(self, id: str, task: str, messages: Sequence[Mapping[str, Any]]) -> TaskSample:
        if [message["role"] for message in messages] != ["user"]:
            raise ValueError(f"{id} is a conversation of several turns: kamera answers one")
        *parts, last = self._parts(messages[0]["content"])
        parts, question = (parts, last.text) if isinstance(last, Passage) else ([*parts, last], "")
        return TaskSample(id, task, tuple(parts), question, None, where=id)

    def _parts(self, content: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        for item in content:
            if item["type"] == "text":
                yield Passage(item["text"], live=True)
            elif item["type"] == "image":
                yield Picture(item["url"])
            elif item["type"] == "video":
                yield Video(item["url"], self.frames)
            else:
                raise ValueError(f"kamera takes text, images and videos, no {item['type']}")


class _Lengths:
    """As `Lengths` of a task; lmms-eval does the rest."""

    overlong: Literal["left", "refuse"] = "refuse"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def max_new_tokens(self, sample: TaskSample) -> int:
        return self.tokens


def _cut(text: str, until: Sequence[str] | str) -> str:
    """The answer up to the first of the stop strings."""
    for end in [until] if isinstance(until, str) else until:
        text = text.split(end)[0] if end else text
    return text.strip()
