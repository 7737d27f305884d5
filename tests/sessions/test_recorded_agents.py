"""A session whose edit policy is an agent's rule prompts with what the agent itself would have sent."""

from __future__ import annotations

import base64
import functools
import io
import json

import pytest

from kamera.content import Conversations
from kamera.engines.hf import HfEngine
from tests.content import templates
from tests.edits.test_recorded import requests, rule
from tests.models import processors
from tests.sessions.rig import session

_CALLS = "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
_TEMPLATE = processors.CHATML.replace("<|im_end|>\n{% endfor %}", f"{_CALLS}<|im_end|>\n{{% endfor %}}")


@functools.cache
def backbone() -> HfEngine:
    """A tiny Qwen2.5-VL whose template shows tools' calls."""
    return HfEngine(processors.matching_model(), processors.picture_processor(_TEMPLATE))


@functools.cache
def _url(name: str) -> str:
    """A data url of a picture of its own for every name."""
    file = io.BytesIO()
    templates.picture(int(name.removeprefix("shot-").removesuffix(".png")), 16, 16).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(messages):
    """Messages with pictures in place of their names."""

    def picture(item):
        return {**item, "image_url": {"url": _url(item["image_url"]["url"])}} if "image_url" in item else item

    return [
        {**m, "content": list(map(picture, m["content"]))} if isinstance(m["content"], list) else m
        for m in json.loads(json.dumps(messages))
    ]


@pytest.mark.parametrize("name", ["agent-s-vllm-generator", "cua-same", "cua-tools", "smolagents"])
def test_the_session_prompts_with_what_the_agent_keeps(name):
    chat, conversations = session(backbone(), edit_policy=rule(name)), Conversations(backbone().processor)
    for full, kept in requests(name)[2::7]:
        chat.next_token_logits(shown(full))
        wanted = conversations.render(shown(kept))
        assert chat.prompt_ids.tolist() == wanted.ids.tolist()
