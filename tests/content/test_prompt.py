"""Prompt seams, on the templates that models in use ship with."""

from __future__ import annotations

from typing import Any

import pytest

from kamera.content.prompt import PromptFormat
from kamera.errors import KameraError, ModalityNotSupported
from tests.models import processors

LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}"
    "{% endif %}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
ONEVISION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}"
    "{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + content['text'] }}{% endfor %}{{'<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for c in message['content'] %}{% if c['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}"
    "{{ c['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": processors.CHATML,
    "llava": LLAVA,
    "onevision": ONEVISION,
    "smolvlm": SMOLVLM,
    "gemma": GEMMA,
}


def prompt(template: str | None) -> PromptFormat:
    return PromptFormat(processors.picture_processor(template))


def item(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("name", "system", "prefix", "tail", "reopen"),
    [
        (
            "chatml",
            "S",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\n",
        ),
        (
            "chatml",
            None,
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\n",
        ),
        ("llava", None, "USER: ", " ASSISTANT:", " USER: "),
        ("llava", "S", "S USER: ", " ASSISTANT:", " USER: "),
        (
            "gemma",
            None,
            "<bos><start_of_turn>user\n",
            "<end_of_turn>\n<start_of_turn>model\n",
            "<end_of_turn>\n<start_of_turn>user\n",
        ),
    ],
)
def test_seams_are_the_templates_own_text(name, system, prefix, tail, reopen):
    assert prompt(TEMPLATES[name]).seams(system) == (type(prompt(None).seams(None)))(prefix, tail, reopen)


@pytest.mark.parametrize("name", TEMPLATES)
def test_seams_and_a_question_are_the_templates_prompt(name):
    made = prompt(TEMPLATES[name])
    seams = made.seams(None)
    messages = [{"role": "user", "content": [item("What is it?")]}]
    whole = made.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert seams.prefix + "What is it?" + seams.tail == whole
    messages += [{"role": "assistant", "content": [item("A cat.")]}]
    messages += [{"role": "user", "content": [item("Sure?")]}]
    dialogue = made.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert dialogue.endswith("A cat." + seams.reopen + "Sure?" + seams.tail)
    assert seams.reopen


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", [[IMAGE], [IMAGE, IMAGE], [IMAGE, item("Look.")]])
def test_pictures_stand_in_a_chunk_as_the_template_writes_them(name, content):
    """Prefix, chunk, question and tail make the prompt the template would have made of them."""
    made = prompt(TEMPLATES[name])
    seams, text = made.seams(None), made.content_text(content)
    messages = [{"role": "user", "content": [*content, item("What?")]}]
    whole = made.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    built = seams.prefix + text + "What?" + seams.tail
    assert "".join(built.split()) == "".join(whole.split())  # templates differ in the space around media
    assert text.count("image") == len([c for c in content if c is IMAGE])
    assert seams.prefix not in text


def test_a_template_that_moves_pictures_is_refused():
    template = (
        "{% for m in messages %}[{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ c['text'] }}{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}"
        "<image>{% endfor %}]{% endfor %}"
    )
    with pytest.raises(KameraError, match="in one piece"):
        prompt(template).content_text([IMAGE])


_COUNTED = {
    "pictures of a conversation": (
        "{% set n = namespace(n=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}{% set n.n = n.n + 1 %}Picture {{ n.n }}:<|image_pad|>"
        "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "pictures of a message": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set n = namespace(n=0) %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}{% set n.n = n.n + 1 %}Picture {{ n.n }}:<|image_pad|>"
        "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "turns": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}<|image_pad|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@pytest.mark.parametrize("name", ["pictures of a conversation", "pictures of a message"])
def test_a_chunk_has_no_number_of_a_picture(name):
    made = prompt(_COUNTED[name])
    for content in ([IMAGE], [item("a"), IMAGE]):
        with pytest.raises(
            ModalityNotSupported, match=r"Picture 1:.*Picture 2:.* a chunk of a window has no"
        ):
            made.chunk([{"role": "user", "content": content}])
    assert made.chunk([{"role": "user", "content": "a"}]).text == "a"
