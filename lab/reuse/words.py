"""Text as words: canonical text for similarity search, and token ids without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from xxhash import xxh32_intdigest

Tokenise = Callable[[str], Sequence[int]]
"""Text to token ids."""

_WORD = re.compile(r"\w{1,12}|[^\w\s]|\n")

_VOLATILE = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[t ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?\b"), "<time>"),
    (re.compile(r"\b(?=\w*\d)(?:0x)?[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(r"\b(?:id|call|req|run|msg|toolu|chatcmpl|session|trace)[-_](?=\w*\d)[\w-]{4,}"), "<id>"),
)


def canonical(text: str) -> str:
    """``text`` without parts that vary between prompts: case, white space, ids and timestamps.

    For indexing only. The original text is prefilled, hashed and compared.
    """
    text = text.lower()
    for pattern, mask in _VOLATILE:
        text = pattern.sub(mask, text)
    return " ".join(text.split())


def word_ids(text: str) -> list[int]:
    """One 32-bit id for each word, sign and line break: about as many as a tokenizer's tokens.

    Deterministic, without a vocabulary; long words are several ids. Two words share an id once in 2**32.
    """
    return [xxh32_intdigest(word.encode("utf-8", "surrogatepass")) for word in _WORD.findall(text)]
