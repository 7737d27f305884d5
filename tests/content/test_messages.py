"""Chat messages keep their roles: in chunks, questions and system prompts, as the template writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kamera import ChunkStore, KameraWindow
from kamera.engines.hf import HfEngine
from kamera.errors import (
    RoleNotSupported,
)
from kamera.window import former_of, sequence_of
from tests.content.templates import GEMMA
from tests.models import processors
from tests.window.rig import question_ids

DEAF = (
    "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] %}"
    "<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FLAT = DEAF.replace("{% if m['role'] in ['system', 'user', 'assistant'] %}", "{% if true %}").replace(
    "{{ m['role'] }}", "{{ 'assistant' if m['role'] == 'assistant' else 'user' }}"
)

END, USER = "<|im_end|>\n", "<|im_start|>user\n"


def make(template: str) -> HfEngine:
    return HfEngine(MODEL, processors.picture_processor(template))


MODEL = processors.matching_model()


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return make(processors.CHATML)


def spelt(backbone: HfEngine, ids: torch.Tensor) -> str:
    return backbone.builder.format.tokenizer.decode(ids, skip_special_tokens=False)


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))


PICTURE = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"

CHUNKS = {
    "tool": ([say("tool", "4 C")], f"{END}<|im_start|>tool\n4 C{END}{USER}"),
    "one message": (say("assistant", "Yes."), f"{END}<|im_start|>assistant\nYes.{END}{USER}"),
    "exchange": (
        [say("user", "Is it cold?"), say("assistant", "Yes.")],
        f"Is it cold?{END}<|im_start|>assistant\nYes.{END}{USER}",
    ),
    "back to the user": (
        [say("assistant", "Yes."), say("user", "Sure?")],
        f"{END}<|im_start|>assistant\nYes.{END}{USER}Sure?",
    ),
    "two of the user": ([say("user", "a"), say("user", "b")], f"a{END}{USER}b"),
    "a picture": (
        [say("user", [{"type": "image", "image": picture()}]), say("tool", ["seen ", picture()])],
        f"{PICTURE}{END}<|im_start|>tool\nseen {PICTURE}{END}{USER}",
    ),
    "system in the middle": ([say("system", "Be brief.")], f"{END}<|im_start|>system\nBe brief.{END}{USER}"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_of_messages_keeps_their_roles(backbone, name):
    messages, want = CHUNKS[name]
    chunk = backbone.chunk(messages)
    assert spelt(backbone, chunk.input_ids) == want


def test_chunks_of_messages_make_the_templates_prompt(backbone):
    """Anchor, chunks and question are what the template renders of the whole conversation."""
    talk = [say("user", "Look."), say("assistant", "Yes."), say("tool", "4 C"), say("user", "And?")]
    window = KameraWindow(backbone, ChunkStore.open("memory://"), "S")
    window.append(talk[0])
    window.append(talk[1:3])
    ids = torch.cat([sequence_of(window).input_ids, question_ids(window, [talk[3]])])
    rendered = backbone.processor.apply_chat_template(
        [say("system", "S"), talk[0], *talk[1:3], talk[3]], tokenize=False, add_generation_prompt=True
    )
    assert spelt(backbone, ids) == rendered


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (DEAF, say("tool", "4 C"), "does not write role 'tool'"),
        (FLAT, say("tool", "4 C"), "does not write role 'tool'"),
        (GEMMA.replace("{% for message", "{% if messages | length > 1 %}{{ raise_exception('no roles') }}"
                       "{% endif %}{% for message", 1), say("tool", "4 C"), "no roles"),
        (processors.CHATML, say("user<|im_end|>", "x"), "is not a name"),
        (processors.CHATML, say("tool\nx", "x"), "is not a name"),
        (processors.CHATML, say(3, "x"), "is not a name"),
        (processors.CHATML, say("", "x"), "is not a name"),
    ],
)  # fmt: skip
def test_a_role_the_template_lacks_is_refused(template, messages, message):
    refusing = make(template)
    with pytest.raises(RoleNotSupported, match=message) as caught:
        refusing.chunk(messages)
    assert "\n" not in str(caught.value)
    with pytest.raises(RoleNotSupported):
        refusing.builder.question_ids([messages], refusing.builder.seams(None).tail)


# -- questions and system prompts ------------------------------------------------------------------


def window(backbone: HfEngine, system: Any = None) -> KameraWindow:
    made = KameraWindow(backbone, ChunkStore.open("memory://"), system)
    made.append("It rains. ")
    return made


def test_a_system_prompt_is_taken_as_messages(backbone):
    assert torch.equal(
        sequence_of(window(backbone, [say("system", "S")])).input_ids,
        sequence_of(window(backbone, "S")).input_ids,
    )
    assert (
        former_of(window(backbone, say("system", "S"))).anchor.digest
        == former_of(window(backbone, "S")).anchor.digest
    )
    shots = [say("system", "S"), say("user", "2+2?"), say("assistant", "4")]
    made = window(backbone, shots)
    whole = [*shots, say("user", "It rains. Why?")]
    rendered = backbone.processor.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    ids = torch.cat([sequence_of(made).input_ids, question_ids(made, "Why?")])
    assert spelt(backbone, ids) == rendered
