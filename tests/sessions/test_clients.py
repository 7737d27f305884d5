"""Clients that edit by themselves are foreseen by their rule."""

from __future__ import annotations

from typing import Any

import pytest

from kamera.edits import policies
from tests.sessions.test_anticipation import (
    CLOSING,
    backbone,
    before_the_answer,
    frames,
    new_tokens,
    nothing_waits,
    opened,
    shown,
)

__all__ = ["backbone", "frames", "nothing_waits"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("client", "listed"),
    [
        (policies.keep_last_images(2), True),
        (policies.keep_last_images(1, batch=2), False),
        (policies.keep_ends(0, 5), True),
    ],
    ids=["pictures", "batch", "ends"],
)
def test_a_client_is_foreseen_whatever_form_it_gives_answers_and_whichever_turns_lack_a_picture(
    backbone, frames, client, listed
):
    """Every fourth turn brings a text alone; what is sent is a rule of the client's over all of them."""
    session, full, found = opened(backbone), [], []
    for i, frame in enumerate([*frames, *frames[:4]]):
        full.append(shown(frame) if i % 4 != 2 else {"role": "user", "content": f"and tag {i}?"})
        given = client(full, 0)
        spans, turn = before_the_answer(session, given)
        found.append((turn.report.left > 0, sum(spans) - new_tokens(session)))
        content: Any = [{"type": "text", "text": turn.text}] if listed else turn.text
        full.append({"role": "assistant", "content": content})
        session.anticipate()
        session.flush()
    first = next(i for i, (left, _) in enumerate(found) if left)
    assert found[first][1] > 50, "the first departure shows the rule"
    assert sum(left for left, _ in found[first + 1 :]) >= 2
    assert max(rest for _, rest in found[first + 1 :]) <= CLOSING
