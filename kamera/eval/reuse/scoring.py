"""Scores and decisions of answers, by the rule that an item names.

| rule | an answer is right by |
|---|---|
| ``letter`` | the option's letter (MuirBench's own rule; OVO-Bench's answers are letters, too) |
| ``words`` | its words, whatever their case and punctuation |
| ``first-word`` | its first word: an action's name, yes or no |
| ``mm-niah`` | MM-NIAH's own scorer |
| ``document`` | MMLongBench-Doc's scorer on the whole response, without the language model that shortens it |
"""

from __future__ import annotations

import re

from kamera.eval.reuse.doc_score import score_document
from kamera.eval.reuse.item import Item
from kamera.eval.tasks.letters import LETTERS, decided, last_letter
from kamera.eval.tasks.mm_niah_score import decide, score_response


def score(response: str, item: Item) -> float | None:
    """The score of a response, 0.0 to 1.0; None without a label. Raises ValueError for an unknown rule."""
    response = response.strip()
    if item.answer is None:
        return None
    if item.rule == "letter":
        return float(_letter(response, item) == item.answer)
    if item.rule == "mm-niah":
        return score_response(response, item.answer)
    if item.rule == "document":
        return score_document(response, item.answer, item.meta["answer_format"])
    return float(decision(response, item) == _words(str(item.answer)))


def decision(response: str, item: Item) -> str:
    """What a response decides: equal decisions have equal scores. Raises ValueError for an unknown rule."""
    response = response.strip()
    if item.rule == "letter":
        return decided(_letter(response, item), response)
    if item.rule == "mm-niah":
        return decide(response, type(item.answer))
    if item.rule == "first-word":
        return _words(response).split(" ")[0]
    if item.rule in ("words", "document"):
        return _words(response)
    raise ValueError(f"item {item.id} is scored by {item.rule!r}: no rule of this Kamera")


def _letter(response: str, item: Item) -> str | None:
    found = last_letter(response, item.choices)
    alone = response.strip().strip(".()").upper()
    return found or (alone if alone in LETTERS[: len(item.choices)] else None)


def _words(response: str) -> str:
    return " ".join(re.findall(r"\w+", response.lower()))
