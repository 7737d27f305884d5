"""What is reused does not depend on where the last image stands: the question and its choices are live."""

import json
from pathlib import Path

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.eval.tasks.milebench import MileBench
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Passage, TaskSample, parse_record
from kamera.eval.trial import Trial
from kamera.testbed.benchmarks import write_mm_niah

FIXTURES = Path(__file__).parent / "fixtures"
ARMS = ("reprefill", "blind", "patch@4")


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


def shown(sample):
    return [(part.text if isinstance(part, Passage) else "<image>", part.live) for part in sample.parts]


def samples(task, folder):
    return [item for item in task.load(FIXTURES / folder) if isinstance(item, TaskSample)]


def test_mm_niahs_question_and_pictured_choices_are_live():
    for sample in samples(MMNiah(), "mm_niah"):
        context = "".join(text for text, live in shown(sample) if not live)
        asked = "".join(text for text, live in shown(sample) if live) + sample.question
        assert context.endswith("\n") and asked.startswith(sample.meta["question"])
    assert any(("<image>", True) in shown(sample) for sample in samples(MMNiah(), "mm_niah"))


def test_milebenchs_question_is_live_and_text_before_it_is_not():
    by_task = {sample.task: sample for sample in samples(MileBench(), "milebench")}
    needle = by_task["TextNeedleInAHaystack"]
    assert needle.question.startswith("Question:")
    assert any("number is:" in text and not live for text, live in shown(needle))
    assert by_task["ALFRED"].question == " Current Step:"  # no mark: what stands behind the last image


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    """The same question twice: its choices in words, and as pictures, which stand behind the context."""
    data = write_mm_niah(tmp_path_factory.mktemp("data"), episodes=1, questions=2, layouts=("LLI",))
    file = data / "mm_niah_val" / "annotations" / "reasoning-text.jsonl"
    worded, other = map(json.loads, file.read_text().splitlines())
    other["question"] = worded["question"]
    worded["meta"]["choices"] = ["red", "blue"]
    other["meta"]["choices_image_path"] = worded["images_list"][:2]
    worded["answer"] = other["answer"] = 0
    file.write_text(json.dumps(worded) + "\n" + json.dumps(other) + "\n")
    return data


def reused(trial):
    return trial.window_tokens - round(trial.recomputed_tokens)


def forwards(trial):
    return trial.forwards + trial.live_forwards


def run(backbone, data, out, **options):
    results = run_task(backbone, MMNiah(["reasoning-text"], bare=True), data, out, arms=ARMS, **options)
    assert not [p for p in results.problems if p.skipped]
    rows = [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]
    return {(row["item"][-1], row["arm"]): parse_record(row, Trial) for row in rows}


def test_reused_tokens_are_the_contexts_for_any_last_image(backbone, pictured, tmp_path):
    rows = run(backbone, pictured, tmp_path / "context")
    for arm in ("blind", "patch@4"):
        assert reused(rows["0", arm]) == reused(rows["1", arm]) > 0
        # the pictured choices are computed behind the context in one forward; pixels are not the context's
        assert forwards(rows["0", arm]) == 0 and forwards(rows["1", arm]) == 1
        assert rows["1", arm].computed_tokens > rows["0", arm].computed_tokens
    assert rows["1", "reprefill"].computed_tokens > rows["1", "blind"].computed_tokens
