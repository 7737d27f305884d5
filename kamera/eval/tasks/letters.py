"""The option letter in a response, as each benchmark's own code finds it.

Where none is found every function gives None. The MMMU-like parsers of the benchmarks then draw a
letter at random; here a response without a letter is wrong, and `unread` counts it in the report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import ascii_uppercase

from kamera.eval.tasks.sample import Answered, Group

LETTERS = tuple(ascii_uppercase)

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


def last_letter(response: str, options: Sequence[str]) -> str | None:
    """MuirBench (MMMU): ``(B)``, else `` B ``, else, in over five words, an option's text.

    Of several the last in the response.
    """
    padded = _padded(response)
    letters = LETTERS[: len(options)]
    for form in ("({})", " {} "):
        places = _places(padded, {letter: form.format(letter) for letter in letters})
        if places:
            return max(places, key=lambda letter: places[letter])
    places = _texts(padded, options)
    return max(places, key=lambda letter: places[letter]) if places else None


def first_letter(response: str, options: Sequence[str]) -> str | None:
    """EgoSchema (lmms-eval): ``(B)``, ``B `` and ``B.`` all count, else, in over five words, a text.

    Of several the first, each taken where it stands last. A capital at the end of a word is ``B ``
    too. ``options`` are with their letters, as the set has them ("A. cooks").
    """
    padded = _padded(response)
    letters = LETTERS[: len(options)]
    forms = {form.format(letter): letter for form in ("({})", "{} ", "{}.") for letter in letters}
    places = _places(padded, {form: form for form in forms})
    if places:
        return forms[min(places, key=lambda form: places[form])]
    places = _texts(padded, options)
    return min(places, key=lambda letter: places[letter]) if places else None


def leading_letter(response: str) -> str:
    """MuirBench (lmms-eval): the capital before a full stop that opens the response, else all of it."""
    match = re.match(r"\s*([A-Z])\.", response)
    return match[1] if match else response


def first_abcd(response: str) -> str | None:
    """Video-MME: the first capital A to D once the usual openings are removed.

    Quirks of the published list: "Best answer: C" gives B (of "Best"), "A man, so C" gives A.
    """
    for prefix in _PREFIXES:
        response = response.replace(prefix, "")
    match = re.search("[ABCD]", response)
    return match[0] if match else None


def unread(answered: Sequence[Answered], find: Callable[[Answered], str | None]) -> tuple[Group, ...]:
    """How many labelled responses hold no option letter, as a row of the report; none if all do."""
    lost = sum(a.score is not None and find(a) is None for a in answered)
    return (Group("extraction", "no option letter (counted wrong)", 0.0, lost),) if lost else ()


def _padded(response: str) -> str:
    for end in _ENDS:  # one after the other, as published: "A.," loses both, "A,." only the stop
        response = response.strip(end)
    return f" {response} "


def _places(text: str, forms: dict[str, str]) -> dict[str, int]:
    """Where each form stands last in the text; forms that do not stand in it are left out."""
    return {key: place for key, form in forms.items() if (place := text.rfind(form)) >= 0}


def _texts(padded: str, options: Sequence[str]) -> dict[str, int]:
    if len(padded.split()) <= 5:
        return {}
    texts = {letter: text.strip().lower() for letter, text in zip(LETTERS, options, strict=False)}
    return _places(padded.lower(), texts)


def decided(letter: str | None, response: str) -> str:
    """A letter as a decision; without one two responses decide alike only if they say the same."""
    return letter.strip().upper() if letter is not None else f"unread: {' '.join(response.split())}"
