"""The native arm is the model without Kamera, and every arm sees pictures of one size."""

import json

import pytest
import torch
from PIL import Image

from kamera import testbed
from kamera.content.media import load_image
from kamera.engines.hf import HfEngine
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Picture
from kamera.eval.tasks.shrink import Shrink
from kamera.testbed.benchmarks import write_mm_niah

ARMS = ("native", "reprefill", "blind", "patch@16")


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mm_niah(tmp_path_factory.mktemp("data"), episodes=2, questions=2, layouts=("LLI",))


def niah():
    return MMNiah(["reasoning-text"], bare=True)


def lines(out):
    return [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(backbone, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return run_task(backbone, niah(), data, out, arms=ARMS), out


@pytest.mark.slow
def test_the_native_arm_is_one_generate_of_transformers(backbone, data, finished):
    _, out = finished
    sample = next(niah().load(data, 1))
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
    (line,) = [x for x in lines(out) if x["item"] == sample.id and x["arm"] == "native"]
    assert line["answer"] == answer.strip()
    around = backbone.processor.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False
    )
    assert line["window_tokens"] == inputs["input_ids"].shape[1] - backbone.builder.tokenize(around).shape[0]
    assert line["recomputed_tokens"] == line["window_tokens"] and not line["question_tokens"]


@pytest.mark.parametrize(
    "options, size, expected",
    [
        ({"max_pixels": 5000}, (200, 100), (100, 50)),
        ({"image_size": 50}, (200, 100), (50, 25)),
        ({"max_pixels": 20000, "image_size": 200}, (200, 100), (200, 100)),
        ({"max_pixels": 5000, "image_size": 20}, (100, 200), (10, 20)),
        ({"max_pixels": 1}, (900, 1), (30, 1)),
        ({}, (200, 100), (200, 100)),
    ],
)
def test_pictures_shrink_to_the_bounds_and_never_grow(options, size, expected):
    assert Shrink(**options).apply(Image.new("RGB", size)).size == expected


@pytest.mark.slow
def test_smaller_pictures_are_fewer_tokens_for_every_arm(backbone, data, finished, tmp_path):
    _, out = finished
    run_task(backbone, niah(), data, tmp_path, arms=ARMS, limit=1, image_size=56)
    small, whole = (
        {x["arm"]: x["window_tokens"] + x["question_tokens"] for x in lines(folder)[:4]}
        for folder in (tmp_path, out)
    )
    assert all(small[arm] < whole[arm] for arm in ARMS) and len(set(small.values())) == 1
    with pytest.raises(ValueError, match="max_pixels is 0"):
        Shrink(max_pixels=0)
