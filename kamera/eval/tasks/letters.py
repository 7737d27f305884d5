"""The option letter in a response, by the rule of each benchmark's own code.

Every function returns None if there is none. The MMMU-like parsers of the benchmarks then draw a letter at
random; here a response without a letter is wrong, and `LetterTask.unread` counts it in the report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from kamera.eval.tasks.sample import Answered, Cell, Task, TaskSample

LETTERS = tuple(ascii_uppercase)
LETTER_ONLY = "\nAnswer with the option's letter from the given choices directly."

_ENDS = (",", ".", "!", "?", ";", ":", "'")
_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    # two pairs are one string each in the published list (a comma is missing), so neither half is removed
    "The best option isThe correct option is",
    "Best answer:Best option:",
    "Answer:",
    "Option:",
)


class LetterTask(Task):
    """What the choice sets share: short answers, of which the option letter counts."""

    def letter(self, response: str, sample: TaskSample) -> str | None:
        """The option letter in a response, by the set's own rule; None without one."""
        raise NotImplementedError

    def score(self, response: str, sample: TaskSample) -> float:
        return float(self.letter(response, sample) == sample.answer)

    def decision(self, response: str, sample: TaskSample) -> str:
        return decision_of(self.letter(response, sample), response)

    def unread(self, answered: Sequence[Answered]) -> tuple[Cell, ...]:
        """Number of labelled responses without an option letter, as a row of the report; no row for zero."""
        lost = sum(a.score is not None and self.letter(a.response, a.sample) is None for a in answered)
        return (Cell("extraction", "no option letter (counted wrong)", 0.0, lost),) if lost else ()


def last_letter(response: str, options: Sequence[str]) -> str | None:
    """MuirBench (MMMU): ``(B)``, else `` B ``, else, in a response of over five words, an option's text.

    The last of several in the response counts.
    """
    padded = _pad(response)
    letters = LETTERS[: len(options)]
    for form in ("({})", " {} "):
        places = _places(padded, {letter: form.format(letter) for letter in letters})
        if places:
            return max(places, key=places.__getitem__)
    places = _texts(padded, options)
    return max(places, key=places.__getitem__) if places else None


def first_letter(response: str, options: Sequence[str]) -> str | None:
    """EgoSchema (lmms-eval): ``(B)``, ``B `` and ``B.`` all count, else, in over five words, a text.

    The first of several counts, each at its last occurrence. A capital at the end of a word is ``B ``
    too. ``options`` include their letters, as in the set ("A. cooks").
    """
    padded = _pad(response)
    letters = LETTERS[: len(options)]
    forms = {form.format(letter): letter for form in ("({})", "{} ", "{}.") for letter in letters}
    places = _places(padded, {form: form for form in forms})
    if places:
        return forms[min(places, key=places.__getitem__)]
    places = _texts(padded, options)
    return min(places, key=places.__getitem__) if places else None


def leading_letter(response: str) -> str:
    """MuirBench (lmms-eval): a capital before a full stop at the start of the response, else all of it."""
    match = re.match(r"\s*([A-Z])\.", response)
    return match[1] if match else response


def first_abcd(response: str) -> str | None:
    """Video-MME: the first capital A to D after the usual openings are removed.

    Quirks of the published list: "Best answer: C" gives B (of "Best"), "A man, so C" gives A.
    """
    for prefix in _PREFIXES:
        response = response.replace(prefix, "")
    match = re.search("[ABCD]", response)
    return match[0] if match else None


def _pad(response: str) -> str:
    for end in _ENDS:  # one after the other, as published: "A.," loses both, "A,." only the stop
        response = response.strip(end)
    return f" {response} "


def _places(text: str, forms: dict[str, str]) -> dict[str, int]:
    """Last occurrence of each form in the text; missing forms are left out."""
    return {key: place for key, form in forms.items() if (place := text.rfind(form)) >= 0}


def _texts(padded: str, options: Sequence[str]) -> dict[str, int]:
    if len(padded.split()) <= 5:
        return {}
    texts = {letter: text.strip().lower() for letter, text in zip(LETTERS, options, strict=False)}
    return _places(padded.lower(), texts)


def decision_of(letter: str | None, response: str) -> str:
    """A letter as a decision; without one the whole response is the decision."""
    return letter.strip().upper() if letter is not None else f"unread: {' '.join(response.split())}"
