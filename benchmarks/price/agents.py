"""Six agents that drop old pictures: each client edits its history before a request and sends all of it.

The model is a Qwen2.5-VL of thin layers and random weights; a logits processor lets it say what the script's
agent says, so that all ways of caching answer the same requests.
"""

from __future__ import annotations

import copy
import random
import re
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import report
from benchmarks.price.chats import SESSIONS
from benchmarks.price.counting import Dictated, named, shared, watching
from benchmarks.price.scripts import AGENTS, Agent, Message
from benchmarks.shapes import TINY
from kamera import ChatSession, ChunkStore, testbed
from kamera.content import Conversations
from kamera.edits import apply_policy
from kamera.engines.hf import HfEngine

_TEMPLATE = (
    "{%- macro said(m) -%}{%- if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for part in m.content -%}{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}"
    "\n<tool_response>\n{{ said(m) }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>\n{%- endif -%}"
    "{%- else -%}<|im_start|>{{ m.role }}\n{{ said(m) }}"
    "{%- for call in m.tool_calls or [] -%}\n<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}<|im_end|>\n{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
"""In the style of Qwen3's: results of tools stand in a user's turn."""


@dataclass(frozen=True)
class Request:
    """What a client sends at a turn, the tokens that are to be said, and what caches prefill for it.

    ``prompt`` is the prompt's length, ``prefix`` the tokens that a prefix cache runs, ``new`` those that the
    turn adds to the same conversation unedited.
    """

    messages: list[Message]
    answer: list[int]
    prompt: int
    prefix: int
    new: int


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each agent, number of pictures and session."""
    backbone = thin(options.layers)
    for kept in options.pictures:
        for agent in AGENTS:
            asked = list(requests(backbone, agent, kept, options.turns, options.side))
            for way, given in SESSIONS.items():
                session = ChatSession(backbone, ChunkStore.open("memory://"), **given)
                row = {"agent": agent.name, "pictures": kept, "policy": way}
                yield {**row, **run(backbone, asked, session)}
            report.progress(f"{agent.name}, {kept} pictures")


def thin(layers: int) -> HfEngine:
    """A Qwen2.5-VL of as many thin layers, random weights and the shipped processor.

    One head of 16 dimensions: what is counted on it is the same on a wide one, and a prompt of 13,000 tokens
    takes seconds. A picture of 8 s pixels a side has s² tokens.
    """
    model, processor = testbed.load()
    processor = copy.deepcopy(processor)
    processor.image_processor.patch_size = int(TINY.vision["patch_size"])
    processor.image_processor.size = {"shortest_edge": 28**2, "longest_edge": 4096**2}
    found = re.search(r"== 'image' -%\}(.*?)\{%-", processor.chat_template)
    assert found, "the shipped template writes a picture in one place"
    processor.chat_template = _TEMPLATE.replace("IMAGE", found[1])
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    more = {"num_hidden_layers": layers, "max_position_embeddings": 1 << 17}
    config = {
        **{name: getattr(model.config, name) for name in ids},
        "text_config": {**TINY.text, **narrow, **more, "vocab_size": len(processor.tokenizer)},
        "vision_config": {**TINY.vision, "out_hidden_size": 16},
    }
    return HfEngine(replace(TINY, config=config).build(dtype=torch.float32).model, processor)


def requests(backbone: HfEngine, agent: Agent, kept: int, turns: int, side: int) -> Iterator[Request]:
    """What the agent's client sends, turn by turn."""
    conversations = Conversations(backbone.processor)
    shot = _shots(side)
    placeholder = int(backbone.model.config.image_token_id)
    rules = (agent.rule(kept, agent.batch), None)
    cached: list[list[Hashable]] = [[], []]
    for turn in range(turns):
        history = agent.history(turn, shot)
        sent = [history if rule is None else apply_policy(rule, history, turn) for rule in rules]
        said = _said(conversations, sent[0], agent.said(turn))
        prompts = [named(conversations.render(m), placeholder) for m in sent]
        run = [len(p) - shared(c, p) for c, p in zip(cached, prompts, strict=True)]
        yield Request(sent[0], said, len(prompts[0]), *run)
        cached = [[*p, *said[:-1]] for p in prompts]


def run(backbone: HfEngine, asked: Sequence[Request], session: ChatSession) -> report.Row:
    """One session of these requests; background work is done before the next one."""
    first: list[list[int]] = []
    with watching(backbone) as ran:
        for request in asked:
            dictated = Dictated(request.answer, ran)
            options: dict[str, Any] = {"logits_processor": [dictated], "max_new_tokens": len(request.answer)}
            session.send(request.messages, do_sample=False, **options)
            session.flush()
            first.append(dictated.first)
    tokens, prefix = sum(map(sum, first)), sum(r.prefix for r in asked)
    answers = sum(len(r.answer) - 1 for r in asked)
    return {
        "prompt tokens": sum(r.prompt for r in asked),
        "new": sum(r.new for r in asked),
        "prefix cache": prefix,
        "first, tokens": tokens,
        "first, forwards of a turn, most": max(map(len, first)),
        "of a prefix cache": round(tokens / prefix, 4),
        "turns over a prefix cache": sum(sum(f) > r.prefix for f, r in zip(first, asked, strict=True)),
        "background, tokens": sum(ran.spans) - tokens - answers,
        "encodes": ran.encodes,
    }


def _shots(side: int) -> Callable[[int], Image.Image]:
    @cache
    def shot(number: int) -> Image.Image:
        """A screenshot of its own: blocks of colour."""
        seed = random.Random(number).randrange(2**32)
        blocks = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        return Image.fromarray(blocks).resize((side, side), Image.Resampling.NEAREST)

    return shot


def _said(conversations: Conversations, sent: list[Message], answer: Message) -> list[int]:
    """The tokens of an answer, up to the one that ends its turn, as the template writes them."""
    ids = conversations.render(sent).ids.tolist()
    closed = conversations.render([*sent, answer, {"role": "user", "content": "x"}]).ids.tolist()
    if closed[: len(ids)] != ids:
        raise AssertionError("an answer continues its prompt")
    (end,) = conversations.tokenize("<|im_end|>")
    return closed[len(ids) : closed.index(end, len(ids)) + 1]
