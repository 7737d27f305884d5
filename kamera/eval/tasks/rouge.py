"""ROUGE-L of the package ``rouge`` 1.0.1: over sets of words, sentence by sentence.

MileBench's published numbers come from that package; other ROUGE-L code gives other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(hypothesis: str, reference: str) -> float:
    """The F score, 0.0 to 1.0; 0.0 if either has no sentence.

    Sentences end at periods. With m and n distinct words in reference and hypothesis, and L of them in the
    union of longest common subsequences: p = L / n, r = L / m, f = 2 p r / (p + r + 1e-8).
    """
    hypotheses, references = _sentences(hypothesis), _sentences(reference)
    if not hypotheses or not references:
        return 0.0
    m = len({word for sentence in references for word in sentence})
    n = len({word for sentence in hypotheses for word in sentence})
    common: set[str] = set()
    for sentence in references:
        for other in hypotheses:
            common |= _common_words(sentence, other)
    precision, recall = len(common) / n, len(common) / m
    return 2.0 * (precision * recall) / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence; one of only spaces holds the empty word, as in the package."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common_words(x: Sequence[str], y: Sequence[str]) -> set[str]:
    """Words of the longest common subsequence found by backtracking; a tie steps back in y."""
    table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, a in enumerate(x, 1):
        for j, b in enumerate(y, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    found = set()
    i, j = len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.add(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
