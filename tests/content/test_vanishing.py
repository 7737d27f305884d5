"""Nothing of a conversation vanishes: what a template does not show is refused by name."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, KameraWindow
from kamera.content import Conversations
from kamera.errors import ModalityNotSupported
from kamera.reuse import Reuser
from kamera.sessions import SessionPool
from tests.content import templates
from tests.content.templates import AGENT, TALK, TEMPLATES, TOOLS
from tests.sessions.rig import EXACT, seeing, session, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}
BLIND = [style for style in TEMPLATES if style != "thinking"]
CALLS = AGENT[:2]


def read(path: str) -> str:
    """Read a file.

    Args:
        path: its path
    """
    return path


@pytest.mark.parametrize("style", BLIND)
def test_tools_that_the_template_does_not_show_are_refused(style):
    backbone = speaking(style)
    says = "does not show tools: leave them out"
    store = ChunkStore.open("memory://")
    calls = [
        lambda: Conversations(backbone.processor).render(TALK, tools=TOOLS),
        lambda: Conversations(backbone.processor).whole(TALK, tools=TOOLS),
        lambda: session(backbone, tools=TOOLS).send(TALK, **GREEDY),
        lambda: session(backbone, tools=[read]).send(TALK, **GREEDY),
        lambda: session(backbone, tools=TOOLS, uncached=True).send(TALK, **GREEDY),
        lambda: SessionPool(backbone, store, policy=EXACT).send(TALK, tools=TOOLS, **GREEDY),
        lambda: Reuser(backbone, store, EXACT).prepare(TALK, tools=TOOLS),
    ]
    for call in calls:
        with pytest.raises(ModalityNotSupported, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("style", BLIND)
def test_tool_calls_that_the_template_does_not_show_are_refused(style):
    chat = session(speaking(style))
    chat.send(TALK, **GREEDY)
    before = chat.messages
    with pytest.raises(ModalityNotSupported, match="does not show tool calls"):
        chat.send(CALLS, **GREEDY)
    assert chat.messages == before


def test_tool_calls_of_a_window_are_refused_too():
    window = KameraWindow(seeing(), ChunkStore.open("memory://"), policy=EXACT)
    with pytest.raises(ModalityNotSupported, match="does not show tool calls"):
        window.append(CALLS)
    with pytest.raises(ModalityNotSupported, match="does not show tool calls"):
        window.append([CALLS[1], AGENT[5]])
    assert window.slots == ()


def test_a_role_that_the_template_drops_is_refused():
    tokenizer = templates.speaker("thinking")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}",
        "{%- for m in messages if m.role not in ('tool', 'system') -%}{%- if m.role == 'tool' -%}",
    )
    conversations = Conversations(tokenizer)
    with pytest.raises(ModalityNotSupported, match="does not show messages of the role 'tool'"):
        conversations.render(AGENT, tools=TOOLS)
    with pytest.raises(ModalityNotSupported, match="does not show messages of the role 'system'"):
        conversations.render([{"role": "system", "content": "Be brief."}, *TALK])
