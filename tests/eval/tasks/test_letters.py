"""Option letters as the published scorers find them, quirks included.

The results are those of the published parsers on the same responses, except that where those draw a
letter at random nothing is found here.
"""

import pytest

from kamera.eval.tasks.letters import first_abcd, first_letter, last_letter, leading_letter
from kamera.eval.tasks.muirbench import MuirBench
from kamera.eval.tasks.sample import Answered, TaskSample

OPTIONS = ("red", "a blue car", "green")
LETTERED = tuple(f"{letter}. {text}" for letter, text in zip("ABC", OPTIONS, strict=True))


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("The answer is B", "B"),
        ("Answer: B", "B"),
        ("A.,", "A"),  # ends are stripped one character after the other, in the published order
        ("A,.", None),
        ("The answer is (A) or (C)", "C"),  # of several the last
        ("A or C", "C"),
        ("C, no: (A) and B", "A"),  # a bracket beats a bare letter
        ("I think it is a blue car here", "B"),  # an option's text, in over five words
        ("it is a blue car", None),
        ("not red at all but rather green", "C"),
        ("B)", None),
        ("b", None),
        ("**B**", None),
        ("D", None),  # there is no fourth option
        ("None", None),
        ("", None),
    ],
)
def test_muirbench_takes_the_last_candidate(response: str, letter: str | None) -> None:
    assert last_letter(response, OPTIONS) == letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B. a blue car", "B"),
        ("The answer is (A) or (C)", "A"),  # of several the first
        ("A or C", "A"),
        ("A, or B. No, A", "B"),  # each candidate is taken where it stands last
        ("from the USA it came, so C", "A"),  # a capital at the end of a word counts
        ("I think it is a blue car here", None),  # the options carry their letters, so texts rarely match
        ("it must be this one: b. a blue car", "B"),
        ("b", None),
        ("", None),
    ],
)
def test_egoschema_takes_the_first_candidate(response: str, letter: str | None) -> None:
    assert first_letter(response, LETTERED) == letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("C", "C"),
        ("C. Blue.", "C"),
        ("(D)", "D"),
        ("The best answer is: C", "C"),
        ("Answer: D", "D"),
        ("Best answer: C", "B"),  # quirk: a comma is missing in the published list of prefixes
        ("A man is seen, so C", "A"),
        ("The third one", None),
        ("one two three four five six seven eight nine ten eleven", None),
        ("one two three four five six seven eight nine ten eleven D", "D"),
        ("c", None),
        ("", None),
    ],
)
def test_video_mme_takes_the_first_capital_a_to_d(response: str, letter: str | None) -> None:
    assert first_abcd(response) == letter


@pytest.mark.parametrize(
    ("response", "found"),
    [("B. red", "B"), (" C.", "C"), ("B", "B"), ("(B)", "(B)"), ("The answer is B.", "The answer is B.")],
)
def test_lmms_eval_takes_a_leading_letter_or_the_response(response: str, found: str) -> None:
    assert leading_letter(response) == found


def test_responses_without_a_letter_are_counted() -> None:
    sample = TaskSample("1", "t", (), "", "A", OPTIONS)
    answered = [Answered(sample, "no idea", 0.0), Answered(sample, "A", 1.0), Answered(sample, "?", None)]
    task = MuirBench()
    (row,) = task.unread(answered)
    assert (row.label, row.score, row.n) == ("no option letter (counted wrong)", 0.0, 1)
    assert task.unread(answered[1:2]) == ()
