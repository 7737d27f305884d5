"""Tool calls of each family, chosen by its template: read, withheld from streams, and in the next prompt."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kamera.engines.hf import HfEngine
from kamera.sessions import Stream, call_form
from tests.content import templates
from tests.models import tiny
from tests.sessions.rig import session

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            },
        },
    }
]
WHO = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
HERMES = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
CODER = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
LLAMA = (
    "{% for c in m.tool_calls or [] %}<|python_tag|>"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
)
MISTRAL = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
DEEPSEEK = (
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name + '\n```json\n' + c.function.arguments }}"
    "\n```<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
)
ONE = {"path": "a", "lines": 3}
TWO = {"path": "b;{", "lines": 4}


def fenced(arguments: dict) -> str:
    body = f"read\n```json\n{json.dumps(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{body}<｜tool▁call▁end｜>"


def tagged(arguments: dict) -> str:
    held = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function=read>\n{held}</function>\n</tool_call>"


def plain(arguments: dict, key: str = "arguments") -> str:
    return json.dumps({"name": "read", key: arguments})


FAMILIES: dict[str, tuple[str, tuple[str, ...], list[str]]] = {
    "hermes": (HERMES, (), [f"<tool_call>\n{plain(a)}\n</tool_call>" for a in (ONE, TWO)]),
    "coder": (CODER, (), [tagged(ONE), tagged(TWO)]),
    "llama": (LLAMA, ("<|python_tag|>",), [f"<|python_tag|>{plain(ONE, 'parameters')}"]),
    "llama, bare": (LLAMA, (), ["; ".join(plain(a, "parameters") for a in (ONE, TWO))]),
    "mistral": (
        MISTRAL,
        ("[TOOL_CALLS]", "[ARGS]"),
        [f"[TOOL_CALLS]read[ARGS]{json.dumps(a)}" for a in (ONE, TWO)],
    ),
    "mistral, list": (MISTRAL, ("[TOOL_CALLS]",), [f"[TOOL_CALLS] [{plain(ONE)}, {plain(TWO)}]"]),
    "mistral, text": (MISTRAL, (), [f"[TOOL_CALLS][{plain(ONE)}]"]),
    "deepseek": (
        DEEPSEEK,
        (),
        ["<｜tool▁calls▁begin｜>", fenced(ONE), "\n", fenced(TWO), "<｜tool▁calls▁end｜>"],
    ),
    "deepseek, bare": (
        DEEPSEEK,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>",
            json.dumps(ONE),
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
    ),
}
"""By family: how its template writes calls, which of its marks are special tokens, and what is said."""


@functools.cache
def backbone(name: str) -> HfEngine:
    """A tiny Llama under a family's template."""
    calls, special, _ = FAMILIES[name]
    tokenizer = templates.speaker("plain")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    tools = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    turns = "{% for m in messages %}" + WHO + calls + "<|im_end|>\n{% endfor %}"
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.chat_template = tools + turns + opening
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    tiny.randomise(model, 1)
    return HfEngine(model, tokenizer)


def dictated(ids: list[int]) -> list[Any]:
    """Logits processors that let the model say ``ids``."""
    left = list(ids)

    def say(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, left.pop(0)] = 0.0
        return forced

    return [say]


class Told(Stream):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pieces: list[str] = []

    def tell(self, text: str) -> None:
        self.pieces.append(text)


def before(name: str) -> str:
    """What is said before the calls; a bare call is the whole answer."""
    return "" if name == "llama, bare" else "I look.\n"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_told_apart_and_written_again_by_the_template(name):
    model, said = backbone(name), before(name) + "".join(FAMILIES[name][2])
    ids = [int(i) for i in model.builder.tokenize(said)]
    count = 2 if '"b;{"' in said or "b;{\n" in said else 1
    chat, asked = session(model, tools=TOOLS), [{"role": "user", "content": "Read."}]
    stream = Told(calls=call_form(model))
    options = {"max_new_tokens": len(ids), "do_sample": False}
    turn = chat.send(asked, stream=stream, logits_processor=dictated(ids), **options)
    found = [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in turn.tool_calls]
    wanted = [("function", "read", json.dumps(a)) for a in (ONE, TWO)[:count]]
    assert found == wanted
    assert turn.content.strip() == before(name).strip() == "".join(stream.pieces)
    assert not any(mark in turn.text for mark in FAMILIES[name][1])
    if count == 2:
        assert turn.tool_calls[0]["id"] != turn.tool_calls[1]["id"]
    if not name.startswith("llama") or count == 1:
        rest = [{"role": "tool", "tool_call_id": c["id"], "content": "empty"} for c in turn.tool_calls]
        client = [*asked, {"role": "assistant", "content": turn.content, "tool_calls": list(turn.tool_calls)}]
        own = chat.fork().next_token_logits(rest, append=True)
        chat.next_token_logits([*client, *rest])
        text = model.processor.decode(chat.prompt_ids)
        assert all(c["function"]["name"] in text.split("Read.")[1] for c in turn.tool_calls)
        assert own.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_prefix_of_an_answer_tells_a_part_of_a_call(name):
    model, said, first = backbone(name), before(name) + "".join(FAMILIES[name][2]), before(name).strip()
    form = call_form(model)
    assert form.decode(model, [int(i) for i in model.builder.tokenize(said)]) == said
    for end in range(len(said) + 1):
        told = said[: form.safe_length(said[:end])]
        assert told == first[: len(told)] and (len(told) >= min(end, len(first)) - 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_whole_call_stays_text(name):
    model, said, first = backbone(name), before(name) + "".join(FAMILIES[name][2]), before(name).strip()
    form = call_form(model)
    for end, rest in itertools.product(range(len(said)), ["", "}", "{", "</tool_call>", "]", "\x00"]):
        content, calls = form.parse(said[:end] + rest, TOOLS)
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
        assert content.startswith(first[:end])
        assert calls or form.without_special_tokens(said[:end] + rest) == content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "ok <tool_call>no</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "read", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 99_999 + "</tool_call>"),
        ("llama, bare", '{"name": "Bob", "age": 3}'),
        ("llama, bare", '{"name": "read", "parameters": {}} is what I would say'),
        ("mistral, text", "[TOOL_CALLS] not a call"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{\n```<｜tool▁call▁end｜>"),
    ],
)
def test_what_only_looks_like_a_call_stays_text(name, text):
    assert call_form(backbone(name)).parse(text) == (text, ())
