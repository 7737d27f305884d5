"""How the frozen language model is asked about screens: it goes on as a line goes on that it has seen.

A screen reaches the model as lines like `Save red` and `Sound off`, and its induction heads go on from a word
as the screen did. It was never taught to read pictures, so plain questions in its chat form fail, on the same
words as text too. `question` is the form that works best.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.report import Row
from benchmarks.screen_reader.screens import COLOURS, Items, Painter, Screen

SYSTEM = "Screen:"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for item in message.content %}"
    "{% if item.type == 'image' %}<image>{% else %}{{ item.text }}{% endif %}{% endfor %}"
    "{% endif %}{% if message.role != 'user' %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""The chat template: plain text, since what is asked is what comes next."""


def question(kind: str, word: str) -> str:
    """What to write behind screens so that the model says what stands behind ``word`` there."""
    return f"\n {word}:" if kind in ("field", "number") else f"\n {word}"


def candidates(kind: str, answer: str, items: Sequence[str], draw: random.Random) -> list[str]:
    """Answers of one token to choose from, the right one among them; eight for a field and for colours."""
    if kind == "field":
        others = [word for word in draw.sample(items, 8) if word != answer][:7]
        return [f" {word}" for word in (answer, *others)]
    if kind == "number":
        return list("0123456789")
    return [" on", " off"] if kind == "check" else [f" {colour}" for colour in COLOURS]


def first_token(kind: str, answer: str) -> str:
    """The text of the first token of an answer: a digit, or a word behind a space."""
    return answer[0] if kind == "number" else f" {answer}"


def answered(backbone: Any, items: Items, seed: int, count: int, shown: int = 8) -> list[Row]:
    """Shares of right answers by kind of thing asked for, of screens of ``shown`` things each.

    ``chosen`` is the best of `candidates`, ``said`` the first of all tokens; of the picture, and of the same
    tokens as text.
    """
    tokenizer, painter, draw = backbone.processor.tokenizer, Painter(items, seed), random.Random(seed)
    hits: dict[str, list[tuple[bool, ...]]] = {}
    for _ in range(count):
        screen = painter.screen(most=shown)
        kind, word, answer = draw.choice(screen.shown)
        inputs = prompt(backbone.processor, [screen], question(kind, word))
        right = tokenizer.encode(first_token(kind, answer))[0]
        among = torch.tensor([tokenizer.encode(c)[0] for c in candidates(kind, answer, items.words, draw)])
        row: list[bool] = []
        for given in (inputs, as_text(backbone.model, items, [screen], inputs)):
            with torch.no_grad():
                logits = backbone.model(**given).logits[0, -1]
            row += [int(among[logits[among].argmax()]) == right, int(logits.argmax()) == right]
        for name in ("all", kind):
            hits.setdefault(name, []).append(tuple(row))
    names = ("picture, chosen", "picture, said", "text, chosen", "text, said")
    return [
        {"asked for": kind, "n": len(rows)}
        | {name: sum(column) / len(rows) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        for kind, rows in hits.items()
    ]


def prompt(processor: Any, screens: Sequence[Screen], asked: str) -> dict[str, torch.Tensor]:
    """Inputs of the plain model for screens one after another, then a question."""
    content = [*({"type": "image"} for _ in screens), {"type": "text", "text": asked}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    made = processor(text=text, images=[screen.picture for screen in screens], return_tensors="pt")
    return dict(made)


def as_text(
    model: Any, items: Items, screens: Sequence[Screen], inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same prompt with the tokens of its screens in the place of their pictures."""
    ids = inputs["input_ids"].clone()
    texts = [text for screen in screens for row in screen.texts for text in row]
    ids[ids == model.config.image_token_id] = torch.tensor([items.ids[text] for text in texts])
    return {"input_ids": ids}
