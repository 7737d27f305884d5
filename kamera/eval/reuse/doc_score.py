"""MMLongBench-Doc's score of a short answer, by the format of the label.

Written anew from the rule of the benchmark's tools, which first let a language model shorten the response.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

_EXACT = (
    re.compile(r"https://"),
    re.compile(r"(\.py|ipynb)$"),
    re.compile(r"^page"),
    re.compile(r"^\d+(-\d+|\s\d+)?$"),
    re.compile(r"[ap]\.m\."),
    re.compile(r"^\d{4}[-\s]\d{2}([-\s]\d{2})?$"),
    re.compile(r"^[\w.%+-]+@[a-z0-9.-]+\.[a-z]{2,}$"),
)
"""Labels that only an equal answer meets: addresses, files, pages, numbers, times, dates."""


def score_document(response: str, answer: Any, form: str) -> float:
    """0.0 to 1.0. ``form`` is the set's ``answer_format``: Int, Float, Str, List, or None for no answer."""
    if form == "Int":
        return float(_number(answer) is not None and _whole(response) == int(float(answer)))
    if form == "Float":
        return float(_close(_number(_clean(answer)), _number(_clean(response))))
    if form in ("Str", "None"):
        return _alike(_clean(answer), _clean(response))
    wanted, given = (sorted(map(_clean, _as_list(one))) for one in (answer, response))
    if len(wanted) != len(given):
        return 0.0
    if wanted and (_number(wanted[0]) is not None or _is_exact(wanted[0])):
        return float(wanted == given)
    return min((_alike(a, b) for a, b in zip(wanted, given, strict=True)), default=1.0)


def _alike(answer: str, response: str) -> float:
    """ANLS with threshold 0.5, or equality for what has one spelling."""
    if _is_exact(answer):
        return float(answer == response)
    longest = max(len(answer), len(response))
    alike = 1.0 - _distance(answer, response) / longest if longest else 1.0
    return alike if alike > 0.5 else 0.0


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


def _close(answer: float | None, response: float | None) -> bool:
    """Equal within 1 %, as a number or as its percentage."""
    if answer is None or response is None:
        return False
    return any(math.isclose(form, response, rel_tol=0.01) for form in (answer / 100, answer, answer * 100))


def _clean(value: Any) -> str:
    text = re.sub(r"\s*\([^)]*\)", "", str(value).lower().strip()).strip()
    text = re.sub(r"^['\"]|['\"]$", "", text).strip()
    return text.lstrip("$").strip().rstrip("%").strip()


def _is_exact(text: str) -> bool:
    return any(form.search(text) for form in _EXACT)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return [value]
    return list(value) if isinstance(value, list | tuple) else [value]
