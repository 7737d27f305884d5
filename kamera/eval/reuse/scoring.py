"""Scores and decisions of answers, by the rule that an item names in ``meta``.

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
from kamera.eval.tasks.letters import LETTERS, decision_of, last_letter
from kamera.eval.tasks.mm_niah_score import decide, score_response
from kamera.eval.tasks.sample import TaskSample


def score(response: str, sample: TaskSample) -> float:
    """The score of a response, 0.0 to 1.0. Raises ValueError for an unknown rule."""
    response, rule = response.strip(), sample.meta["rule"]
    if rule == "letter":
        return float(_letter(response, sample) == sample.answer)
    if rule == "mm-niah":
        return score_response(response, sample.answer)
    if rule == "document":
        return score_document(response, sample.answer, sample.meta["answer_format"])
    return float(decision(response, sample) == _words(str(sample.answer)))


def decision(response: str, sample: TaskSample) -> str:
    """What a response decides: equal decisions have equal scores. Raises ValueError for an unknown rule."""
    response, rule = response.strip(), sample.meta["rule"]
    if rule == "letter":
        return decision_of(_letter(response, sample), response)
    if rule == "mm-niah":
        return decide(response, type(sample.answer))
    if rule == "first-word":
        return _words(response).split(" ")[0]
    if rule in ("words", "document"):
        return _words(response)
    raise ValueError(f"an item is scored by {rule!r}: no rule of this Kamera")


def _letter(response: str, sample: TaskSample) -> str | None:
    found = last_letter(response, sample.choices)
    alone = response.strip().strip(".()").upper()
    return found or (alone if alone in LETTERS[: len(sample.choices)] else None)


def _words(response: str) -> str:
    return " ".join(re.findall(r"\w+", response.lower()))
