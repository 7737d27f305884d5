"""The runner, from files to a table with a gap and its repair, on the trained backbone."""

import json
from pathlib import Path

import pytest
import torch

from kamera import testbed
from kamera.content.media import load_image
from kamera.engines.hf import HfEngine
from kamera.errors import TaskDataError
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Picture
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


def scores(results):
    return [(row.arm, row.summary.mean, row.summary.groups, row.agreement) for row in results.arms]


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


def test_an_unreadable_image_costs_its_sample_and_no_other(backbone, tmp_path):
    data = write_mm_niah(tmp_path / "data", episodes=2, questions=1, layouts=("LI",))
    (data / "mm_niah_val" / "images" / "world" / "0-0.png").write_bytes(b"no picture")
    results = run_task(backbone, niah(), data, tmp_path / "out", arms=("reprefill",))
    (problem,) = results.problems
    assert results.items == 1 and results.skipped == 1
    assert problem.where.endswith("reasoning-text.jsonl:1") and "0-0.png" in problem.what
