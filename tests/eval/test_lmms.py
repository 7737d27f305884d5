"""The lmms-eval plugin answers as ``kamera eval`` does, all arms in one pass."""

import json

import pytest

pytest.importorskip("lmms_eval")

from lmms_eval.api.instance import Instance
from lmms_eval.models.registry_v2 import ModelRegistryV2

from kamera import testbed
from kamera.eval.lmms import Kamera, manifest
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Picture
from kamera.testbed.benchmarks import write_mm_niah


def model(out, **options):
    return Kamera(str(testbed.weights_dir()), out=str(out), **options)


def messages(sample):
    content = [
        {"type": "image", "url": part.source}
        if isinstance(part, Picture)
        else {"type": "text", "text": part.text}
        for part in sample.parts
    ]
    return [{"role": "user", "content": [*content, {"type": "text", "text": sample.question}]}]


def requests(kamera, samples, **generation):
    kamera.task_dict = {"niah": {"val": samples}}
    meta = {"task": "niah", "doc_id": 0, "repeats": 1}
    generation = {"max_new_tokens": 16, **generation}
    return [
        Instance("generate_until", ("", messages, generation, i, "niah", "val"), 0, meta)
        for i in range(len(samples))
    ]


def test_lmms_eval_finds_the_chat_model():
    registry = ModelRegistryV2()
    registry.register_manifest(manifest())
    assert registry.get_model_class("kamera") is Kamera


def test_the_plugin_answers_as_kamera_eval_does_in_one_pass(tmp_path):
    data = write_mm_niah(tmp_path / "data", episodes=1, questions=2, layouts=("LLI",))
    task = MMNiah(["reasoning-text"], bare=True)
    samples = list(task.load(data))
    arms = "native:reprefill:blind:patch@16"
    kamera = model(tmp_path / "out", arms=arms, answer="reprefill")
    said = kamera.generate_until(requests(kamera, samples))
    lines = [json.loads(line) for line in (tmp_path / "out" / "items.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [""] * 8
    run_task(kamera.backbone, task, data, tmp_path / "eval", arms=("reprefill",))
    theirs = [json.loads(line) for line in (tmp_path / "eval" / "items.jsonl").read_text().splitlines()]
    assert said == [line["answer"] for line in theirs]
    assert all(
        line["recomputed_tokens"] < line["window_tokens"]
        for line in lines
        if line["arm"] in ("blind", "patch@16")
    )

    other = model(tmp_path / "out", arms=arms, answer="blind")  # answers that are there already
    with other.backbone.measure() as work:
        blind = other.generate_until(requests(other, samples))
    assert work.forwards == 0
    assert blind == [line["answer"] for line in lines if line["arm"] == "blind"]


def test_what_kamera_does_not_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is none of the arms"):
        model(tmp_path, arms="blind", answer="patch@16")
    with pytest.raises(ValueError, match="batch_size=1"):
        model(tmp_path, batch_size=4)
    kamera = model(tmp_path / "out", arms="blind")
    with pytest.raises(ValueError, match="kamera is greedy"):
        kamera.generate_until(requests(kamera, [None], temperature=0.7))
