"""Scores and decisions of answers, by the rule that an item names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kamera.eval.reuse.doc_score import score_document
from kamera.eval.reuse.item import Item
from kamera.eval.tasks.letters import LETTERS, decided, last_letter
from kamera.eval.tasks.mm_niah_score import decide, score_response


class Rule(NamedTuple):
    """``score`` gives 0.0 to 1.0 against the item's answer; equal ``decision``s have equal scores."""

    score: Callable[[str, Item], float]
    decision: Callable[[str, Item], str]


def _letter(response: str, item: Item) -> str | None:
    found = last_letter(response, item.choices)
    alone = response.strip().strip(".()").upper()
    return found or (alone if alone in LETTERS[: len(item.choices)] else None)


def _words(response: str) -> str:
    return " ".join(re.findall(r"\w+", response.lower()))


def _chosen(response: str, item: Item) -> float:
    return float(_letter(response, item) == item.answer)


RULES: Mapping[str, Rule] = {
    # the option's letter (MuirBench's own rule; OVO-Bench's answers are letters, too)
    "letter": Rule(_chosen, lambda r, item: decided(_letter(r, item), r)),
    # the words, whatever their case and punctuation
    "words": Rule(lambda r, item: float(_words(r) == _words(str(item.answer))), lambda r, _: _words(r)),
    # the first word: an action's name, yes or no
    "first-word": Rule(
        lambda r, item: float(_words(r).split(" ")[0] == _words(str(item.answer))),
        lambda r, _: _words(r).split(" ")[0],
    ),
    "mm-niah": Rule(
        lambda r, item: score_response(r, item.answer), lambda r, item: decide(r, type(item.answer))
    ),
    # MMLongBench-Doc's scorer on the whole response: without the language model that shortens it
    "document": Rule(
        lambda r, item: score_document(r, item.answer, item.meta["answer_format"]), lambda r, _: _words(r)
    ),
}


def score(response: str, item: Item) -> float | None:
    """The score of a response by the item's rule; None without a label."""
    return None if item.answer is None else RULES[item.rule].score(response.strip(), item)


def decision(response: str, item: Item) -> str:
    """What a response decides, by the item's rule."""
    return RULES[item.rule].decision(response.strip(), item)
