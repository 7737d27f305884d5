"""MM-NIAH's scorer against golden results of the official one."""

import pytest

from kamera.eval.tasks.mm_niah_score import LABELS, bin_scores, place, score_response
from kamera.eval.tasks.vqa_text import normalize, strip_punctuation


@pytest.mark.parametrize("response", ["C", "c.", "C. foo", "2", "The answer is C.", "**C**"])
def test_choice_is_read(response):
    assert score_response(response, 2) == 1.0


@pytest.mark.parametrize("response", ["(C)", "C) foo", "Answer: C", "None", "", "3", "²", "D"])
def test_choice_is_not_read(response):
    assert score_response(response, 2) == 0.0


def test_camera_directions_are_choices_a_and_b():
    assert score_response("I think the camera is moving left", 0) == 1.0
    assert score_response("The camera is moving right.", 1) == 1.0
    assert score_response("The camera is moving right.", 0) == 0.0


@pytest.mark.parametrize(
    "response, score",
    [
        ("[1,3]", 2 / 3),
        ("[1,2,2,9]", 2 / 3),
        ("```json\n[1, 3, 2]\n```", 1.0),
        ('{"x": [1,3,2]}', 1.0),
        ('[1.0,"3",2]', 2 / 3),
        ("[1,3,2].", 1.0),
        ("1, 3, 2", 0.0),
        ("The list is [1,3,2]", 0.0),
        ('{"x":1}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_lists_score_softly_by_position(response, score):
    assert score_response(response, [1, 3, 2]) == pytest.approx(score)


@pytest.mark.parametrize(
    "response, answer, score",
    [
        ("It is an Oak tree.", "oak", 1.0),
        ("3 people", "three people", 1.0),
        ("oakland", "oak", 0.0),
        ("dont", "don't", 1.0),
        ("1, 3, 2", "[1, 3]", 1.0),
    ],
)
def test_words_are_found_in_normal_form(response, answer, score):
    assert score_response(response, answer) == score


def test_a_comma_in_a_number_deletes_all_marks():
    assert strip_punctuation("a/b") == "a b"
    assert strip_punctuation("a/b 1,200") == "ab 1200"


def test_periods_go_up_to_the_thirty_second():
    assert strip_punctuation("." * 40 + "x") == "." * 8 + "x"
    assert normalize("3.5 metres.") == "3.5 metres"


@pytest.mark.parametrize(
    "length, column", [(650, -1), (1000, 0), (2000, 1), (63_999, 9), (64_000, 10), (90_000, 10)]
)
def test_length_bins_are_lower_edges(length, column):
    assert place(length, 0.5).column == column
    assert LABELS[0] == "1k" and LABELS[-1] == "64k"


@pytest.mark.parametrize(
    "depth, row", [(0.0, 0), (0.19, 0), (0.2, 1), (1.0, 4), ([0.0, 1.0], 2), ([1.0, 1.0], 4)]
)
def test_depth_rows_of_several_needles_are_their_mean(depth, row):
    assert place(1000, depth).row == row


def test_one_right_sample_in_a_bin_scores_a_fifth():
    assert bin_scores([(place(1500, 0.5), 1.0)]) == [0.2] + [0.0] * 10


def test_a_bin_is_the_mean_of_rows_not_of_samples():
    scored = [(place(1500, 0.1), s) for s in (1.0, 1.0, 1.0)] + [(place(1500, 0.5), 0.0)]
    assert bin_scores(scored)[0] == pytest.approx(0.2)


def test_contexts_below_a_thousand_tokens_are_discarded():
    assert bin_scores([(place(650, 0.5), 1.0)]) == [0.0] * 11
