"""Plain questions about screens, with their answers, and how many a reader answers.

The words of a question vary, and of each list of `ASKED` the tuning never sees the last. An answer is what
stands on the screen, token for token, so a word begins with a space: ` red`, `47`, ` second`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.report import Row
from benchmarks.screen_reader.screens import COLOURS, Items, Painter, Screen
from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy

SYSTEM = "You answer questions about screens."
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}"
    "{% if item.type == 'image' %}<image>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template: SmolLM2's own marks, and pictures."""

ASKED: dict[str, tuple[str, ...]] = {
    "word": (
        "What colour is the word {}?",
        "What colour is {}?",
        "In which color is {} written?",
        "Which colour has {}?",
        "Tell me the colour of {}.",
        "What is the color of the word {}?",
    ),
    "button": (
        "What colour is the button {}?",
        "Which color is the button {}?",
        "What is the colour of the {} button?",
        "Which colour has {}?",
        "Tell me the color of the button {}.",
        "Which colour does the {} button have?",
    ),
    "check": (
        "Is {} on?",
        "Is the checkbox {} ticked?",
        "Is {} switched on?",
        "Is {} on or off?",
        "What is the state of {}?",
        "Is the {} checkbox on?",
    ),
    "field": (
        "Which word is in the field {}?",
        "What does the field {} say?",
        "What is written in {}?",
        "What is the value of the field {}?",
        "Tell me what is in the {} field.",
        "What does {} contain?",
    ),
    "number": (
        "What number is {}?",
        "How much is {}?",
        "What is the number of {}?",
        "What is the value of {}?",
        "Which number stands behind {}?",
        "Tell me the number in {}.",
    ),
    "selected": (
        "Which word is selected?",
        "What is in the highlighted row?",
        "Which row is selected?",
        "Which word is highlighted?",
    ),
    "screen": (
        "On which of the screens was the {1} {0}?",
        "On which of the screens is {0}?",
        "Which screen shows the {1} {0}?",
        "Which screen has {0}?",
        "Where did you see the {1} {0}?",
    ),
}
NAMED = {"word": "word", "button": "button", "check": "checkbox", "field": "field", "number": "number"}
HELD_WORDS, HELD_FACE = 6, 3
"""Every sixth word, and what is drawn in this face, is on the screens of the tuning, and never asked for."""
PLACES = ("first", "second", "third")
_SPOKEN = {"on": "yes", "off": "no"}


class Question(NamedTuple):
    """What is asked for, in which words, and the answer's text; of which screen, and which thing on it."""

    kind: str
    text: str
    answer: str
    place: int
    thing: int


def questions(
    screens: Sequence[Screen],
    draw: random.Random,
    kinds: Sequence[str] = tuple(ASKED),
    fit: Callable[[Screen, int], bool] = lambda screen, index: True,
    unseen: bool = False,
) -> list[Question]:
    """All that can be asked about screens without doubt, in words that ``draw`` chooses; kinds take turns.

    A word that stands in two places is not asked about. ``fit`` says which of a screen's things may be;
    ``unseen`` takes the words that the tuning never sees.
    """
    found: dict[str, int] = {}
    for screen in screens:
        for row in screen.texts:
            for text in row:
                found[text] = found.get(text, 0) + 1
    made = []
    for place, screen in enumerate(screens):
        for index, (kind, word, answer) in enumerate(screen.shown):
            if found[word] > 1 or not fit(screen, index):
                continue
            if kind in kinds:
                text = _words(kind, draw, unseen).format(word)
                spoken = _SPOKEN[answer] if kind == "check" and _is_yes_no(text) else answer
                made.append(Question(kind, text, spoken if kind == "number" else f" {spoken}", place, index))
            if "screen" in kinds and 1 < len(screens) <= len(PLACES):
                text = _words("screen", draw, unseen).format(word, NAMED[kind])
                made.append(Question("screen", text, f" {PLACES[place]}", place, index))
            if "selected" in kinds and found.get("selected") == 1 and screen.leads(index):
                text = _words("selected", draw, unseen)
                made.append(Question("selected", text, f" {word}", place, index))
    draw.shuffle(made)
    rows = [[question for question in made if question.kind == kind] for kind in ASKED]
    draw.shuffle(rows)
    most = max(map(len, rows))
    return [row[turn] for turn in range(most) for row in rows if turn < len(row)]


def _words(kind: str, draw: random.Random, unseen: bool) -> str:
    return ASKED[kind][-1] if unseen else draw.choice(ASKED[kind][:-1])


def _is_yes_no(text: str) -> bool:
    return text.startswith("Is ") and not text.endswith("or off?")


def candidates(question: Question, items: Items, draw: random.Random) -> list[str]:
    """Answers to choose from by their first token, the right one first; eight for words and for colours."""
    kind, answer = question.kind, question.answer
    if kind in ("field", "selected"):
        others: list[str] = [f" {word}" for word in draw.sample(items.words, 8)]
    elif kind == "number":
        others = list("0123456789")
    elif kind == "check":
        others = [" yes", " no"] if answer.strip() in _SPOKEN.values() else [" on", " off"]
    else:
        others = [f" {text}" for text in (PLACES if kind == "screen" else COLOURS)]
    first = answer[0] if kind == "number" else answer
    return [first, *(text for text in others if text != first)][: 10 if kind == "number" else 8]


def prompt(
    processor: Any, screens: Sequence[Screen], asked: str, system: str = SYSTEM
) -> dict[str, torch.Tensor]:
    """Inputs of the plain model for screens one after another, then a question."""
    content = [*({"type": "image"} for _ in screens), {"type": "text", "text": asked}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    made = processor(text=text, images=[screen.picture for screen in screens], return_tensors="pt")
    return dict(made)


def is_held_out(items: Items) -> Callable[[Screen, int], bool]:
    """Whether a thing on a screen is never asked for in the tuning, for its words or its face."""
    words = set(items.words[::HELD_WORDS])

    def held(screen: Screen, index: int) -> bool:
        _, word, answer = screen.shown[index]
        return word in words or answer in words or screen.faces[index] == HELD_FACE

    return held


def answered(
    backbone: Backbone,
    painter: Painter,
    seed: int,
    screens: int,
    count: int,
    most: int = 8,
    unseen: bool = False,
) -> Iterator[Row]:
    """``count`` questions, four a window of so many fresh screens with at most ``most`` things on each.

    ``said`` is whether the window's greedy answer is right to its last letter, ``chosen`` whether the right
    one is the best of `candidates`, and ``as plain`` (of the first of each window) whether plain transformers
    say the same.
    """
    draw, held = random.Random(seed), is_held_out(painter.items)
    tokenizer, done = backbone.processor.tokenizer, 0
    while done < count:
        drawn = [painter.screen(most=most) for _ in range(screens)]
        asked = questions(drawn, draw, unseen=unseen)[: min(4, count - done)]
        window = KameraWindow(
            backbone, ChunkStore.open("memory://"), system=SYSTEM, policy=ReusePolicy.exact()
        )
        for screen in drawn:
            window.append(screen.picture)
        for number, question in enumerate(asked):
            said = window.generate(question.text, max_new_tokens=8, do_sample=False)
            logits = window.next_token_logits(question.text)
            among = [tokenizer.encode(text)[0] for text in candidates(question, painter.items, draw)]
            row: dict[str, Any] = {"screens": screens, "asked for": question.kind}
            row |= {"held out": held(drawn[question.place], question.thing)}
            row |= {"chosen": int(logits[among].argmax()) == 0, "said": said == question.answer}
            if not number:
                plain = backbone.model.generate(
                    **prompt(backbone.processor, drawn, question.text), max_new_tokens=8, do_sample=False
                )[0]
                row["as plain"] = tokenizer.decode(plain, skip_special_tokens=True).endswith(
                    f"assistant\n{said}"
                )
            yield row
            done += 1
