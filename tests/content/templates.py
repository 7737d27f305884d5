"""Chat templates in the styles of the families, over one byte tokenizer, and conversations to render."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import processors

_SPECIAL = (
    "<pad>",
    "<bos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "</s>",
)

_THINKING = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if tools -%}<|im_start|>system\n# Tools\n"
    "{%- for t in tools -%}{{ t | tojson }}\n{%- endfor -%}<|im_end|>\n"
    "{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>\n{%- endif -%}"
    "{%- else -%}"
    "<|im_start|>{{ m.role }}\n"
    "{%- set c = m.content or '' -%}"
    "{%- if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last -%}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{{ c }}"
    "{%- for call in m.tool_calls or [] -%}\n<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}"
    "<|im_end|>\n"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
_HEADERS = (
    "<bos>{%- for m in messages -%}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>\n\n{%- endif -%}"
)
_TURNS = (
    "<bos>{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<start_of_turn>model\n{%- endif -%}"
)
_INSTRUCTIONS = (
    "<bos>{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}[INST] {{ m.content }} [/INST]"
    "{%- elif m.role == 'assistant' -%}{{ ' ' + m.content }}</s>"
    "{%- else -%}{{ m.content }}\n\n{%- endif -%}{%- endfor -%}"
)
_PLAIN = (
    "{%- for m in messages -%}{{ m.role | upper }}: {{ m.content }}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"
)

TEMPLATES = {
    "thinking": _THINKING,
    "headers": _HEADERS,
    "turns": _TURNS,
    "instructions": _INSTRUCTIONS,
    "plain": _PLAIN,
}
"""ChatML with tools and thinking (Qwen3), Llama 3, Gemma, Mistral, and one without special tokens."""


def speaker(style: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer under the template ``style``, with merges across spaces and line ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), (":", "Ġ"), ("Ġ", "t"), ("e", "r"), ("i", "n"), (".", "Ċ")]
    pieces = [*_SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<bos>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=[t for t in _SPECIAL if t not in ("<bos>", "</s>", "<pad>")],
    )
    made.chat_template = TEMPLATES[style]
    return made


def picture(seed: int, width: int = 48, height: int = 32) -> Image.Image:
    """Noise, a picture of its own for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def seeing() -> Any:
    """A real picture processor under Qwen2.5-VL's template."""
    return processors.picture_processor()


Messages = list[dict[str, Any]]

TALK: Messages = [
    {"role": "user", "content": "What stands in the log?\nLook at the end."},
    {"role": "assistant", "content": "It ends there."},
    {"role": "user", "content": "And before?"},
]
LONG_TALK: Messages = [
    *TALK,
    {"role": "assistant", "content": "\n".join(f"line {i}: nothing in it." for i in range(60))},
    {"role": "user", "content": "Thanks. Is that all?"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
]
AGENT: Messages = [
    {"role": "user", "content": "Mend the test."},
    {
        "role": "assistant",
        "content": "<think>\nfirst look\n</think>\n\nI read it.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "def a():\n    return 1\n"},
    {"role": "tool", "tool_call_id": "2", "content": "error: no such file"},
    {"role": "assistant", "content": "<think>\nso it is\n</think>\n\nDone."},
    {"role": "user", "content": "Run it."},
]


def screens(count: int, first: int = 0) -> Messages:
    """A session of ``count`` screenshots, each with a word before and an action behind it."""
    out: Messages = [{"role": "system", "content": "You use a computer."}]
    for i in range(first, first + count):
        content = [{"type": "text", "text": f"step {i}"}, {"type": "image", "image": picture(i)}]
        out += [{"role": "user", "content": content}, {"role": "assistant", "content": f"click {i}"}]
    return [*out, {"role": "user", "content": "what now?"}]


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
