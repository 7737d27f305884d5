"""Text normalisation of the VQA-derived scorers, quirks included.

Source: the VQA evaluation's answer processing, in the version of MM-NIAH and MileBench.
"""

from __future__ import annotations

import re

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = 32
"""The scorers pass a regular expression flag as a count: 32 periods are removed, the rest stay."""

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = {word: str(number) for number, word in enumerate(_UNITS.split())}
_NUMBERS |= {word: str(10 * number) for number, word in enumerate(_TENS.split(), 2)}
_ARTICLES = {"a", "an", "the"}

_CONTRACTED = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't "
    "haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've "
    "might've mustn't must've needn't not've o'clock oughtn't shan't should've she'd've shouldn't "
    "'ow's'at shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll "
    "someone's something'd something'd've something'll that's there'd there'd've there're there's they'd "
    "they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've "
    "when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't "
    "would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
)
_CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word
    for word in _CONTRACTED.split()
    for at, mark in enumerate(word)
    if mark == "'"
} | {"somebody'd": "somebodyd"}
"""Each word with an apostrophe missing, to the word; the source has one entry reversed."""


def strip_punctuation(text: str) -> str:
    """Delete or blank each punctuation mark.

    A mark is deleted if the text has it next to a space, or a number with a comma anywhere; else a space
    replaces it. The first 32 periods without a following digit are deleted.
    """
    number = _COMMA_IN_NUMBER.search(text) is not None
    out = text
    for mark in _PUNCTUATION:
        apart = number or mark + " " in text or " " + mark in text
        out = out.replace(mark, "" if apart else " ")
    return _PERIOD.sub("", out, count=_MOST_PERIODS)


def on_one_line(text: str) -> str:
    """Newlines and tabs become spaces; spaces at the ends are stripped."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def normalize(text: str) -> str:
    """VQA's normal form: no punctuation, lower case, digits for number words, no articles.

    >>> normalize("It is an Oak tree.")
    'it is oak tree'
    """
    words = strip_punctuation(on_one_line(text)).lower().split()
    digits = [_NUMBERS.get(word, word) for word in words]
    return " ".join(_CONTRACTIONS.get(word, word) for word in digits if word not in _ARTICLES)


def holds_word(text: str, word: str) -> bool:
    """True if ``word`` occurs in ``text`` between word boundaries."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None
