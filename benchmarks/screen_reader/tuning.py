"""The language model learns to answer: low-rank updates of its layers, with the tower before it.

A sequence is one to three screens and many questions behind them, each of which sees the screens and itself
alone, as if it stood right behind them; or a talk, whose screens come one after another. What is learned from
are the answers, end to end into the tower, which also goes on learning what stands in each square.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import report
from benchmarks.screen_reader.questions import ASKED, SYSTEM, Question, is_held_out, questions
from benchmarks.screen_reader.screens import Items, Painter, Screen, pixels
from benchmarks.screen_reader.tower import Tower
from benchmarks.screen_reader.training import Targets, square_loss

SYSTEMS = (
    SYSTEM, SYSTEM, "", "You use a computer.", "You watch a screen.", "You are a helpful assistant.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face", "Screens of a computer.",
    "You look at screenshots and answer in one word.", "You are an agent that uses a computer for its user.",
)  # fmt: skip
BEFORE = ("", "", "", "", "step {}", "Step {}:\n", "Screen {}: ", "This is the screen.\n")
STAGES = ((1, 5), (2, 8), (3, 10))
"""Screens, and things on each, at most."""
PASS = 0.7


class Lora(nn.Module):
    """A frozen linear layer and its update, ``up @ down`` of the given rank, in float32."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


class Lesson(NamedTuple):
    """Tokens with their positions, the branch that each is in (0: all see it), and the token that should come
    next (-1: not learned); and each question with its answer's first place and length among the learned."""

    ids: torch.Tensor
    positions: torch.Tensor
    branches: torch.Tensor
    targets: torch.Tensor
    asked: list[tuple[Question, int, int]]


class Student(nn.Module):
    """The tower, the language model in bf16 with its updates, and the rows of the tokens around a picture."""

    def __init__(self, tower: Tower, language: Any, rows: torch.Tensor, image: int, rank: int):
        super().__init__()
        self.tower, self.text = tower, language.requires_grad_(False)
        self.rows, self.image = nn.Parameter(rows.clone()), image
        for layer in self.text.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, Lora(linear, rank))

    def updates(self) -> dict[str, torch.Tensor]:
        """The factors of the language model's updates, by the names of its layers."""
        return {
            name.removeprefix("text."): p for name, p in self.learned().items() if name.startswith("text.")
        }

    def learned(self) -> dict[str, torch.Tensor]:
        """All that is trained, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, lesson: Lesson, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Logits [answer tokens, vocabulary] where ``targets`` are; ``seen`` are the screens' embeddings."""
        table, ids = self.text.embed_tokens.weight, lesson.ids
        whole = torch.cat([table, self.rows.to(dtype)])
        embedded = whole[ids]
        embedded = embedded.masked_scatter((ids == self.image)[:, None], seen.to(dtype))
        branch = lesson.branches
        open_ = (branch[None] == branch[:, None]) | (branch[None] == 0)
        mask = torch.zeros(open_.shape, dtype=dtype).masked_fill_(~open_.tril(), torch.finfo(dtype).min)
        hidden = self.text(
            inputs_embeds=embedded[None],
            attention_mask=mask[None, None],
            position_ids=lesson.positions[None],
            use_cache=False,
        ).last_hidden_state[0]
        return (hidden[lesson.targets >= 0] @ whole.T).float()


def _lesson(
    ids: list[int], positions: list[int], branches: list[int], targets: list[int], asked: list[Any]
) -> Lesson:
    made = [torch.tensor(column) for column in (ids, positions, branches, targets)]
    return Lesson(made[0], made[1], made[2], made[3], asked)


class Packer:
    """Makes token sequences of screens and questions."""

    def __init__(self, tokenizer: Any, image: int):
        self._ids = tokenizer.encode
        self._known: dict[str, list[int]] = {}
        around = image - 1
        self._picture = [around, image + 1, *[image] * 64, around]

    def ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._ids(text)
        return self._known[text]

    def head(self, system: str) -> list[int]:
        start = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        return self.ids(f"{start}<|im_start|>user\n")

    def pictures(self, first: int, count: int, before: str) -> list[int]:
        """Screens from number ``first`` on, each behind the text ``before``."""
        return [i for n in range(first, first + count) for i in self.ids(before.format(n)) + self._picture]

    def answer(self, question: Question) -> tuple[list[int], list[int]]:
        return (
            self.ids(f"{question.text}<|im_end|>\n<|im_start|>assistant\n"),
            self.ids(question.answer) + self.ids("<|im_end|>"),
        )

    def branches(self, screens: int, asked: Sequence[Question], system: str, before: str = "") -> Lesson:
        """Screens, and questions behind them that do not see each other."""
        ids = self.head(system) + self.pictures(1, screens, before)
        front = len(ids)
        positions, branch, targets = list(range(front)), [0] * front, [-1] * front
        spans = []
        for number, question in enumerate(asked, 1):
            text, answer = self.answer(question)
            fed = text + answer[:-1]
            spans.append((question, sum(t >= 0 for t in targets), len(answer)))
            targets += [-1] * (len(text) - 1) + answer
            ids += fed
            positions += range(front, front + len(fed))
            branch += [number] * len(fed)
        return _lesson(ids, positions, branch, targets, spans)

    def talk(self, turns: Sequence[tuple[int, Question]], system: str, before: str = "") -> Lesson:
        """Turns of a user, who shows so many screens in each and asks, and of the assistant."""
        ids = list(self.head(system))
        targets, shown = [-1] * len(ids), 0
        spans: list[tuple[Question, int, int]] = []
        for screens, question in turns:
            text, answer = self.answer(question)
            if spans:
                ids += self.ids("\n<|im_start|>user\n")
                targets += [-1] * (len(ids) - len(targets))
            ids += self.pictures(shown + 1, screens, before) + text
            shown += screens
            targets += [-1] * (len(ids) - 1 - len(targets))
            spans.append((question, sum(t >= 0 for t in targets), len(answer)))
            targets += answer
            ids += answer
            targets += [-1] * (len(ids) - len(targets))
        positions = range(len(ids))
        return _lesson(ids, list(positions), [0] * len(ids), targets, spans)


class Teacher:
    """Draws screens and questions for the tuning."""

    def __init__(self, items: Items, packer: Packer, seed: int):
        self.painter, self.packer = Painter(items, seed), packer
        self.draw = random.Random(seed)
        held = is_held_out(items)
        self.fit = lambda screen, index: not held(screen, index)

    def lesson(self, stage: int) -> tuple[list[Screen], Lesson]:
        draw = self.draw
        most, things = STAGES[stage]
        while True:
            count = draw.randint(1, most)
            screens = [
                self.painter.screen(most=draw.randint(2, things), words=draw.choice((0.2, 0.35)))
                for _ in range(count)
            ]
            system, before = draw.choice(SYSTEMS), draw.choice(BEFORE)
            if draw.random() < 0.25 and stage:
                turns = []
                for number in range(count):
                    shown = screens[: number + 1]
                    asked = questions(shown, draw, _NO_SCREEN, self.fit)[: draw.randint(1, 3)]
                    turns += [(int(not place), question) for place, question in enumerate(asked)]
                    if not asked:
                        break
                else:
                    return screens, self.packer.talk(turns, system, before)
                continue
            asked = questions(screens, draw, fit=self.fit)[:10]
            if asked:
                return screens, self.packer.branches(count, asked, system, before)


_NO_SCREEN = tuple(kind for kind in ASKED if kind != "screen")


@torch.no_grad()
def examined(
    student: Student, packer: Packer, items: Items, seed: int, screens: int, count: int, **options: Any
) -> dict[str, tuple[int, int]]:
    """Answers right to the last token, of all asked, by kind: ``count`` windows of so many fresh screens."""
    painter, draw = Painter(items, seed), random.Random(seed)
    hits: dict[str, list[int]] = {}
    dtype = student.text.embed_tokens.weight.dtype
    for _ in range(count):
        drawn = [painter.screen(most=8) for _ in range(screens)]
        asked = questions(drawn, draw, **options)[:8]
        if not asked:
            continue
        lesson = packer.branches(screens, asked, SYSTEM)
        seen = student.tower(torch.from_numpy(pixels(drawn)))[0].flatten(0, 1)
        right = student(lesson, seen, dtype).argmax(-1) == lesson.targets[lesson.targets >= 0]
        for question, start, length in lesson.asked:
            hits.setdefault(question.kind, []).append(int(right[start : start + length].all()))
    return {kind: (sum(found), len(found)) for kind, found in hits.items()}


def tune(
    student: Student,
    packer: Packer,
    targets: Targets,
    out: Path,
    *,
    minutes: float,
    batch: int,
    peak: float,
    tower_peak: float,
    seed: int,
    every: float = 4.0,
) -> dict[str, torch.Tensor]:
    """Tune ``student`` for so many minutes; the running mean of what it learned, by name.

    ``out`` gets a checkpoint every two minutes, from which a second run goes on, and a line of what was
    answered about fresh screens every ``every`` minutes.
    """
    learned = student.learned()
    slow = [p for name, p in learned.items() if name.startswith("tower.")]
    fast = [p for name, p in learned.items() if not name.startswith("tower.")]
    optimizer = torch.optim.AdamW(
        [{"params": fast, "of": peak}, {"params": slow, "of": tower_peak}],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    mean = {name: p.detach().clone() for name, p in learned.items()}
    spent, step, stage, recent = 0.0, 0, 0, 0.0
    kept = out / "tune.pt"
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        spent, step, stage, recent = state["at"]
        for name, p in learned.items():
            p.data.copy_(state["learned"][name])
        mean = state["mean"]
        optimizer.load_state_dict(state["optimizer"])
    teacher = Teacher(targets.items, packer, 2_000_000 + seed + 1000 * step)
    dtype = student.text.embed_tokens.weight.dtype
    start = time.monotonic() - spent * 60
    saved = told = spent
    answers = 0.0
    while spent < minutes:
        share = max(0.03, min((step + 1) / 30, 1.05 - spent / minutes, 1.0))
        for group in optimizer.param_groups:
            group["lr"] = group["of"] * share
        optimizer.param_groups[1]["lr"] *= min(1.0, stage)  # the tower waits until its reader can read
        optimizer.zero_grad()
        lessons = [teacher.lesson(stage) for _ in range(batch)]
        drawn = [screen for screens, _ in lessons for screen in screens]
        seen = student.tower(torch.from_numpy(pixels(drawn)))[0]
        cut = seen.detach().requires_grad_()
        at, right, loss_of = 0, 0.0, 0.0
        for screens, lesson in lessons:
            own = cut[at : at + len(screens)].flatten(0, 1)
            at += len(screens)
            true = lesson.targets[lesson.targets >= 0]
            logits = student(lesson, own, dtype)
            loss = F.cross_entropy(logits, true) / batch
            loss.backward()
            loss_of += loss.item()
            hit = logits.argmax(-1) == true
            right += sum(bool(hit[s : s + n].all()) for _, s, n in lesson.asked) / len(lesson.asked) / batch
        squares = square_loss(targets, seen.flatten(0, 1), targets.of(drawn))
        torch.autograd.backward([seen, squares], [cut.grad, None])
        nn.utils.clip_grad_norm_(fast, 1.0)
        nn.utils.clip_grad_norm_(slow, 1.0)
        optimizer.step()
        step += 1
        weight = min(0.98, step / (step + 10))
        for name, p in learned.items():
            mean[name].lerp_(p.detach(), 1 - weight)
        recent, answers = 0.95 * recent + 0.05 * right, 0.95 * answers + 0.05 * loss_of
        if stage + 1 < len(STAGES) and (recent > PASS or spent / minutes > (0.2, 0.35)[stage]):
            stage, recent = stage + 1, 0.0
        spent = (time.monotonic() - start) / 60
        if spent - saved > 2 or spent >= minutes:
            saved = spent
            state = {"at": (spent, step, stage, recent), "learned": dict(learned), "mean": mean}
            torch.save(state | {"optimizer": optimizer.state_dict()}, out / "tune.part")
            (out / "tune.part").rename(kept)
        if step % 20 == 0:
            report.progress(
                f"minute {spent:.1f}, step {step}, stage {stage}: {recent:.3f} right, loss {answers:.3f}"
            )
        if spent - told > every or spent >= minutes:
            told = spent
            own = {name: p.detach().clone() for name, p in learned.items()}
            put(learned, mean)
            row: dict[str, Any] = {"minute": round(spent, 1), "step": step, "stage": stage}
            row |= {"right": round(recent, 3), "loss": round(answers, 3)}
            held = is_held_out(targets.items)
            for count in (1, 2, 3):
                found = examined(student, packer, targets.items, 500 + count, count, 12, fit=held)
                whole = [sum(column) for column in zip(*found.values(), strict=True)]
                row[f"{count} screens"] = round(whole[0] / whole[1], 3)
                row[f"{count} kinds"] = {kind: f"{a}/{b}" for kind, (a, b) in found.items()}
            put(learned, own)
            with (out / "tuning.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
    return mean


def put(learned: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Set parameters to values, by name."""
    for name, p in learned.items():
        p.data.copy_(values[name])
