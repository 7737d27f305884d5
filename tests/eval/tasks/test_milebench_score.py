"""MileBench's scorers against golden results of the official ones."""

import pytest

from kamera.eval.tasks.milebench_score import label, metric_of, process, score_response
from kamera.eval.tasks.rouge import rouge_l

BAG = ("Opened the bag.", "Closed the closet/cabinet.", "Opened the laptop.", "Ate the sandwich.")
MANY = tuple(f"image{i}" for i in range(1, 31))


def choice(response, answer, choices):
    return score_response(response, answer, choices, "choice")


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "B.",
        "b",
        "(B)",
        "B. Closed the closet/cabinet.",
        "The person closed the closet/cabinet",
    ],
)
def test_choice_is_extracted(response):
    assert choice(response, BAG[1], BAG) == 1.0


@pytest.mark.parametrize("response", ["The answer is B", "Answer: B", "A or B", "None", ""])
def test_choice_is_lost_as_the_official_code_loses_it(response):
    assert choice(response, BAG[1], BAG) == 0.0


def test_silence_is_choice_c():
    assert choice("", BAG[2], BAG) == 1.0


def test_an_option_that_begins_another_is_found_first():
    assert choice("image12", "image1", MANY) == 1.0
    assert choice("image12", "image12", MANY) == 0.0


def test_no_is_found_in_not():
    assert choice("not sure", "no", ("yes", "no")) == 1.0


def test_a_decimal_option_is_found_only_by_its_letter():
    assert choice("3.5", "3.5", ("2.5", "3.5")) == 0.0
    assert choice("B. 3.5", "3.5", ("2.5", "3.5")) == 1.0


def test_labels_go_on_behind_z():
    assert [label(i) for i in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]


def test_a_needle_is_a_word_of_its_own():
    assert score_response("5,626,534", "5626534", (), "needle") == 1.0
    assert score_response("56265341", "5626534", (), "needle") == 0.0
    assert score_response("56265341", "5626534", (), "contains") == 1.0


def test_metrics_go_by_name_then_type():
    assert metric_of("TextNeedleInAHaystack", "open-ended") == "needle"
    assert metric_of("MMCoQA", "multi-choice") == "contains"
    assert metric_of("ALFRED", "open-ended") == "rouge-l"
    assert metric_of("TQA", "multi-choice") == "choice"
    with pytest.raises(ValueError, match="'essay'"):
        metric_of("TQA", "essay")


def test_normal_form_keeps_articles_and_number_words():
    assert process("'The three Boxes.'\n") == "the three boxes"


def test_rouge_golden_results():
    reference = "place tissue box on back of toilet in front of candle stick"
    assert rouge_l("place tissue box on the toilet", reference) == pytest.approx(0.588235, abs=1e-6)
    assert rouge_l("a b", "a a b") == pytest.approx(0.999999995, abs=1e-9)
    assert rouge_l("a a b", "a b") == pytest.approx(0.999999995, abs=1e-9)


def test_rouge_of_nothing_is_zero():
    assert score_response("", "Place the box.", (), "rouge-l") == 0.0
    assert rouge_l("...", "a b") == 0.0


def test_rouge_unites_subsequences_over_sentences():
    assert rouge_l("a c x", "a. c") == pytest.approx(0.8, abs=1e-6)


def test_rouge_breaks_ties_as_the_package_does():
    # "c a" and "a c x" share one word in order: the backtrack finds "a", which was counted already
    assert rouge_l("a c x", "a. c a") == pytest.approx(0.4, abs=1e-6)
