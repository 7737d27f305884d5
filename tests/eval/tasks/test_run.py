"""The runner, from files to a table with a gap and its repair, on the trained backbone."""

import json
from pathlib import Path

import pytest
import torch

from kamera import testbed
from kamera.content.build import ChunkBuilder
from kamera.content.media import load_image
from kamera.engines.hf import HfEngine
from kamera.errors import TaskDataError
from kamera.eval.arms import arms_named
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.journal import Journal, SampleRow
from kamera.eval.tasks.milebench import MileBench
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Picture, TaskSample
from kamera.eval.trial import Trial
from kamera.testbed.benchmarks import write_milebench, write_mm_niah

ARMS = ("reprefill", "blind", "patch@16")


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_mm_niah(folder, episodes=2, questions=3, layouts=("LLI",))
    return write_milebench(folder, episodes=1, questions=1, layouts=("LLI",))


def niah(*subtasks):
    return MMNiah(subtasks or ("reasoning-text",), bare=True)


@pytest.fixture(scope="module")
def finished(backbone, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    both = niah("retrieval-text", "reasoning-text")
    return run_task(backbone, both, data, out, arms=ARMS, limit=6), out


def lines(out):
    return [json.loads(line) for line in (Path(out) / "items.jsonl").read_text().splitlines()]


def size(line):
    return line["window_tokens"] + line["live_tokens"] + line["question_tokens"]


def scores(results):
    return [(row.arm, row.summary.mean, row.summary.groups, row.agreement) for row in results.arms]


class Padded(ChunkBuilder):
    """Of a model whose answers begin and end with spaces, as many models' do."""

    def detokenize(self, ids):
        return f" {super().detokenize(ids)} \n"


class Verbatim(MMNiah):
    """Scores as strictly as the official choice and list scorers do."""

    def score(self, response, sample):
        return float(response == sample.answer)


def forwards(backbone, *arguments, **options):
    with backbone.measure() as work:
        results = run_task(backbone, *arguments, **options)
    return work.forwards, results


def test_the_patch_restores_what_blind_reuse_loses(finished):
    results, _ = finished
    reprefill, blind, patch = results.arms
    assert [row.arm for row in results.arms] == list(ARMS)
    assert results.items == results.labelled == 12 and results.problems == ()
    assert reprefill.summary.mean >= blind.summary.mean + 0.25
    assert reprefill.agreement == 1.0 and patch.agreement >= 0.75 > blind.agreement
    assert patch.flip_recover >= 0.75 and blind.flip_recover == 0.0


def test_the_gap_is_in_the_bound_questions(finished):
    results, _ = finished
    lost = {g.label: g.score for g in results.arm("reprefill").summary.groups if g.by == "subtask"}
    for group in results.arm("blind").summary.groups:
        if group.by == "subtask":
            lost[group.label] -= group.score
    assert lost["reasoning-text-val"] > lost["retrieval-text-val"] + 0.25


def test_reuse_runs_no_forward_and_the_reprefill_one_per_chunk(finished):
    results, out = finished
    for line in lines(out):
        # three frames and their captions; the first stands where its canonical was made
        assert line["forwards"] == (5 if line["arm"] == "reprefill" else 0)
        assert (line["recomputed_tokens"] > 0) == (line["arm"] == "reprefill")
        assert (line["patch_bytes"] > 0) == (line["arm"] == "patch@16")
        assert line["kv_bytes"] > 0 and line["window_tokens"] > 0
    assert results.arm("patch@16").kv_share > 0.0


def test_the_reprefill_answers_as_transformers_does(backbone, data, finished):
    _, out = finished
    sample = next(niah("retrieval-text").load(data, 1))
    pictures = [load_image(part.source) for part in sample.parts if isinstance(part, Picture)]
    content = [
        {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part.text}
        for part in sample.parts
    ]
    message = {"role": "user", "content": [*content, {"type": "text", "text": sample.question}]}
    text = backbone.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    inputs = backbone.processor(text=[text], images=pictures, return_tensors="pt")
    with torch.no_grad():
        made = backbone.model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = backbone.builder.detokenize(made[0, inputs["input_ids"].shape[1] :])
    said = next(x["answer"] for x in lines(out) if x["item"] == sample.id and x["arm"] == "reprefill")
    assert said == answer


def test_generated_text_is_stripped_before_it_is_scored(backbone, data, tmp_path):
    task = Verbatim(["retrieval-text"], bare=True)
    plain = run_task(backbone, task, data, tmp_path / "plain", arms=("reprefill",), limit=2)
    padded = HfEngine(backbone.model, backbone.processor)
    padded.builder = Padded(backbone.model, backbone.processor, sees=True)
    spaced = run_task(padded, task, data, tmp_path / "padded", arms=("reprefill",), limit=2)
    assert spaced.arm("reprefill").summary.mean == plain.arm("reprefill").summary.mean > 0.5
    said = [line["answer"] for line in lines(tmp_path / "padded")]
    assert said == [line["answer"] for line in lines(tmp_path / "plain")]


def test_the_first_tokens_kl_stands_beside_the_decisions(finished):
    results, out = finished
    reprefill, blind, patch = (row.first_token_kl for row in results.arms)
    assert reprefill == 0.0 < patch < blind
    ids = {(line["item"], tuple(line["first_token"]["ids"])) for line in lines(out)}
    assert len(ids) == len({item for item, _ in ids}) == 12  # every arm's are the re-prefill's


def test_predictions_are_written_for_every_arm(finished):
    _, out = finished
    for arm in ARMS:
        file = out / "predictions" / arm / f"{arm}_reasoning-text-val.jsonl"
        assert len(file.read_text().splitlines()) == 6


def test_a_second_run_answers_only_what_is_missing(backbone, data, finished, tmp_path):
    before, out = finished
    both = niah("retrieval-text", "reasoning-text")
    kept = (out / "items.jsonl").read_text().splitlines(keepends=True)
    for name in ("run.json", "items.jsonl"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    nothing, again = forwards(backbone, both, data, tmp_path, arms=ARMS, limit=6)
    assert nothing == 0
    assert scores(again) == scores(before)

    # a run killed in the middle of a line, or before its end: the last arm of the last sample is asked again
    for cut in (40, -1):
        (tmp_path / "items.jsonl").write_text("".join(kept[:-1]) + kept[-1][:cut])
        _, again = forwards(backbone, both, data, tmp_path, arms=ARMS, limit=6)
        assert scores(again) == scores(before)
        redone, last = lines(tmp_path)[-1], json.loads(kept[-1])
        assert [redone[key] for key in ("item", "arm", "answer")] == [
            last[key] for key in ("item", "arm", "answer")
        ]
        assert len(lines(tmp_path)) == (tmp_path / "items.jsonl").read_text().count("\n") == len(kept)


def test_a_damaged_line_in_the_middle_is_refused(backbone, data, finished, tmp_path):
    _, out = finished
    (tmp_path / "run.json").write_bytes((out / "run.json").read_bytes())
    kept = (out / "items.jsonl").read_text().splitlines(keepends=True)
    kept[3] = kept[3][:20] + "\n"
    (tmp_path / "items.jsonl").write_text("".join(kept))
    with pytest.raises(TaskDataError, match=r"items\.jsonl:4: damaged"):
        run_task(backbone, niah(), data, tmp_path, arms=ARMS)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"arms": ARMS, "reuse": "all"}, "reuse"),
        ({"arms": ARMS, "max_tokens": 900}, "max_tokens"),
        ({"arms": ARMS, "system": "Look."}, "system"),
    ],
)
def test_another_run_is_not_gone_on_with(backbone, data, finished, options, said):
    _, out = finished
    before = (out / "items.jsonl").read_bytes()
    with pytest.raises(TaskDataError, match=f"was run with {said}"):
        run_task(backbone, niah(), data, out, **options)
    assert (out / "items.jsonl").read_bytes() == before


def test_another_model_is_refused(tmp_path):
    Journal(tmp_path, {"backbone": "a"})
    with pytest.raises(TaskDataError, match="was run with backbone 'a', not 'b'"):
        Journal(tmp_path, {"backbone": "b"})
    with pytest.raises(ValueError, match="already holds a run"):
        Journal(tmp_path, {"backbone": "a"}, resume=False)


@pytest.mark.parametrize("name", ["items.jsonl", "samples.jsonl"])
@pytest.mark.parametrize(
    "line", ['"x"', "5", "null", "[]", "{}", '{"first_token": []}', '{"more": 1}', '{"sample": 5}']
)
def test_a_line_of_another_kind_is_damaged(tmp_path, name, line):
    Journal(tmp_path, {})
    (tmp_path / name).write_text(f"{line}\n" * 2)
    with pytest.raises(TaskDataError, match=f"{name}:1: damaged"):
        Journal(tmp_path, {})


def test_records_come_back_as_they_went(tmp_path):
    first = Trial("s", "reprefill", "B", FirstToken((3, 1), (-0.5, -1.25), None), recomputed_tokens=2.5)
    sample = TaskSample("s", "t", (), "q", [1, "x"], ("A", "B"), {"metric": "choice"}, "f:1", 1)
    journal = Journal(tmp_path, {})
    journal.add(first)
    journal.add_row(SampleRow.of(sample, 4))
    again = Journal(tmp_path, {})
    assert again.trials == journal.trials and again.rows == journal.rows
    longer = '{"more": 1, ' + (tmp_path / "items.jsonl").read_text()[1:]
    (tmp_path / "items.jsonl").write_text(longer * 2)
    with pytest.raises(TaskDataError, match="1: damaged"):
        Journal(tmp_path, {})


def test_changed_data_are_refused(backbone, data, finished, tmp_path):
    _, out = finished
    other = write_mm_niah(tmp_path, episodes=2, questions=3, layouts=("LLI",))
    file = other / "mm_niah_val" / "annotations" / "reasoning-text.jsonl"
    record, *rest = file.read_text().splitlines(keepends=True)
    changed = {**json.loads(record), "answer": "nothing"}
    file.write_text(json.dumps(changed) + "\n" + "".join(rest))
    with pytest.raises(TaskDataError, match=r"reasoning-text\.jsonl:1: .* is not the sample"):
        run_task(backbone, niah(), other, out, arms=ARMS)


def test_an_over_long_needle_prompt_is_answered_none_and_counted(backbone, data, tmp_path):
    results = run_task(backbone, niah(), data, tmp_path, arms=("blind",), limit=2, max_tokens=60)
    assert results.notes == (("blind", "over-length", 2),)
    assert results.arm("blind").summary.mean == 0.0
    assert [line["answer"] for line in lines(tmp_path)] == ["None", "None"]


def test_an_over_long_milebench_prompt_keeps_its_instruction(backbone, data, tmp_path):
    task = MileBench(["MMCoQA"])
    run_task(backbone, task, data, tmp_path / "whole", arms=("blind",), limit=1)
    (whole,) = lines(tmp_path / "whole")
    room = (
        512
        + backbone.builder.tokenize(backbone.builder.seams(None).prefix, special=True).shape[0]
        + size(whole)
        - 1
    )
    results = run_task(backbone, task, data, tmp_path / "cut", arms=("blind",), limit=1, max_tokens=room)
    (cut,) = lines(tmp_path / "cut")
    assert results.notes == (("blind", "cut", 1),)
    first = backbone.chunk(next(task.load(data, 1)).parts[1].source)
    assert size(cut) == size(whole) - first.num_tokens


def test_an_unreadable_image_costs_its_sample_and_no_other(backbone, tmp_path):
    data = write_mm_niah(tmp_path / "data", episodes=2, questions=1, layouts=("LI",))
    (data / "mm_niah_val" / "images" / "world" / "0-0.png").write_bytes(b"no picture")
    results = run_task(backbone, niah(), data, tmp_path / "out", arms=("reprefill",))
    (problem,) = results.problems
    assert results.items == 1 and results.skipped == 1
    assert problem.where.endswith("reasoning-text.jsonl:1") and "0-0.png" in problem.what


def test_private_labels_give_predictions_and_no_score(backbone, tmp_path):
    data = write_mm_niah(tmp_path / "data", episodes=1, questions=1, layouts=("LI",))
    file = data / "mm_niah_val" / "annotations" / "reasoning-text.jsonl"
    file.write_text(json.dumps({**json.loads(file.read_text()), "answer": None}) + "\n")
    results = run_task(backbone, niah(), data, tmp_path / "out", arms=("reprefill",))
    assert (results.items, results.labelled, results.skipped) == (1, 0, 0)
    assert "private labels" in results.problems[0].what
    row = json.loads((tmp_path / "out/predictions/reprefill/reprefill_reasoning-text-val.jsonl").read_text())
    assert row["answer"] is None and row["response"]


def test_an_id_that_was_there_before_is_skipped(backbone, tmp_path):
    data = write_mm_niah(tmp_path / "data", episodes=1, questions=1, layouts=("LI",))
    file = data / "mm_niah_val" / "annotations" / "reasoning-text.jsonl"
    file.write_text(file.read_text() * 2)
    results = run_task(backbone, niah(), data, tmp_path / "out", arms=("blind",))
    (problem,) = results.problems
    assert results.items == 1 and problem.where.endswith(":2") and "occurs twice" in problem.what


@pytest.mark.parametrize("names", [["prefill"], ["patch"], ["patch@0"], ["patch@x"], ["blind", "blind"], []])
def test_unknown_arms_are_refused_with_the_list(names):
    with pytest.raises(ValueError, match=r"reprefill, native, blind, .*, patch@RANK"):
        arms_named(names)
