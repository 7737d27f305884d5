"""Messages of the three APIs: texts keep the form in which the client wrote them, where it has two."""

from __future__ import annotations

import pytest

from kamera.content import Fields, anthropic_messages, chat_message, response_items

TEXTS = [{"type": "text", "text": "15 C"}, {"type": "text", "text": ", cloudy"}]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("content", ["15 C\n", TEXTS])
def test_a_chat_message_has_the_content_that_was_written(role, content):
    extra = {"tool_call_id": "1"} if role == "tool" else {}
    message = chat_message(Fields({"role": role, "content": content, **extra}))
    assert message["content"] == content


def test_texts_of_apis_that_know_parts_alone_are_one_text():
    result = {"type": "tool_result", "tool_use_id": "1", "content": TEXTS}
    (tool, user) = anthropic_messages(Fields({"role": "user", "content": [result, *TEXTS]}))
    assert tool["content"] == user["content"] == "15 C, cloudy"
    (answer,) = response_items(
        [Fields({"role": "assistant", "content": [{"type": "output_text", "text": "15 C"}]})]
    )
    assert answer["content"] == "15 C"
