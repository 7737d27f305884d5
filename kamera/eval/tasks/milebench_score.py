"""MileBench's scorers: needle, ROUGE-L and choice extraction, with its quirks for comparable numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from kamera.eval.tasks.rouge import rouge_l
from kamera.eval.tasks.vqa_text import on_one_line, strip_punctuation

Metric = Literal["needle", "contains", "rouge-l", "choice"]


def metric_of(task: str, question_type: str | None) -> Metric:
    """Metric of a task: by its name first, then by its ``question_type``.

    Raises ValueError for a question type that is neither multi-choice nor open-ended.
    """
    if "NeedleInAHaystack" in task:
        return "needle"
    if "MMCoQA" in task:
        return "contains"
    if question_type == "open-ended":
        return "rouge-l"
    if question_type == "multi-choice":
        return "choice"
    raise ValueError(f"question_type {question_type!r} is neither multi-choice nor open-ended")


def process(text: str) -> str:
    """Normal form of responses, answers and options: no punctuation, quotes or capitals."""
    return strip_punctuation(on_one_line(text)).strip("'").strip('"').strip().lower()


def label(index: int) -> str:
    """A … Z, AA … AZ, BA …"""
    prefix = "" if index < 26 else "A" if index < 52 else "B"
    return prefix + chr(ord("A") + index - 26 * min(index // 26, 2))


def score_response(response: str, answer: str, choices: Sequence[str], metric: Metric) -> float:
    """Score from 0.0 to 1.0. For ``"choice"``, ``answer`` is one of ``choices``."""
    text, truth = process(response), process(answer)
    if metric == "needle":
        return float(truth in text.split())
    if metric == "contains":
        return float(truth in text)
    if metric == "rouge-l":
        return rouge_l(text, truth)
    options = [process(choice) for choice in choices]
    return float(extract_choice(text, options) == label(options.index(truth)))


def decide(response: str, choices: Sequence[str], metric: Metric) -> str:
    """The letters of an extracted choice, else the response in the scorer's normal form."""
    text = process(response)
    return extract_choice(text, [process(choice) for choice in choices]) if metric == "choice" else text


def extract_choice(response: str, options: Sequence[str]) -> str:
    """The label a processed response names among processed options; "" for none.

    In this order: an empty response is C; a "label option" anywhere gives its first letter; an option
    anywhere after spaces are removed gives its label (the first match: "image12" matches "image1"); one
    or two letters that are a label; else every letter that is a label.
    """
    labels = [label(i) for i in range(len(options))]
    if response == "":
        return "C"
    both = [_escape(process(f"{name} {option}")) for name, option in zip(labels, options, strict=True)]
    hit = re.search("|".join(both), response, re.DOTALL)
    # an empty match has no first letter: official code fails there and takes the response itself
    if hit is not None:
        return hit.group(0)[:1].upper()
    plain = [_escape(process(option)).replace(" ", "") for option in options]
    hit = re.search("|".join(plain), response.replace(" ", ""), re.DOTALL)
    # compared in escaped form: an option with a decimal point never matches here
    if hit is not None and hit.group(0).strip() in plain:
        return labels[plain.index(hit.group(0).strip())]
    if response.upper() in labels:
        return response.upper()
    return "".join(letter.upper() for letter in response if letter.upper() in labels)


def _escape(text: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)
