"""Six agents that keep their last pictures: what each sees and says, and how its client edits the history.

Forms of messages and rules are those of the conversations in ``tests/edits/recorded``, where the agents' own
code was run; the recorded rules' number of pictures is replaced by N. OmniParser's blocks of Anthropic's API
are written as OpenAI's messages, which a chat template takes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from kamera.edits import EditPolicy, policies

Message = dict[str, Any]
Shot = Callable[[int], Image.Image]
"""The screenshot of a number."""


@dataclass(frozen=True)
class Agent:
    """``opening`` begins the history; ``seen`` follows the answer of the turn before, ``said`` is an answer.

    ``rule`` is what the client applies to the whole history before each request, for a number of pictures and
    a batch; ``batch`` is the agent's own.
    """

    name: str
    opening: Callable[[Shot], list[Message]]
    seen: Callable[[int, Shot], list[Message]]
    said: Callable[[int], Message]
    rule: Callable[[int, int], EditPolicy]
    batch: int = 1

    def history(self, turn: int, shot: Shot) -> list[Message]:
        """What the agent knows at a turn (from 0), unedited."""
        messages = [*self.opening(shot), *self.seen(0, shot)]
        for past in range(turn):
            messages += [self.said(past), *self.seen(past + 1, shot)]
        return messages


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _image(picture: Image.Image) -> Message:
    return {"type": "image", "image": picture}


def _user(*items: Message) -> Message:
    return {"role": "user", "content": list(items)}


def _spoken(turn: int) -> Message:
    draw = random.Random(turn)
    return {"role": "assistant", "content": f"click({draw.randrange(1000)}, {draw.randrange(1000)})"}


def _listed(turn: int) -> Message:
    return {"role": "assistant", "content": [_text(_spoken(turn)["content"])]}


def _called(turn: int) -> Message:
    draw = random.Random(turn)
    arguments = json.dumps({"action": "click", "x": draw.randrange(1000), "y": draw.randrange(1000)})
    function = {"name": "computer", "arguments": arguments}
    call = {"id": f"id-{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": f"I look at row {turn}.", "tool_calls": [call]}


def _result(turn: int, *items: Message) -> Message:
    return {"role": "tool", "tool_call_id": f"id-{turn}", "content": list(items)}


def _cua_seen(turn: int, shot: Shot) -> list[Message]:
    if turn == 0:
        return []
    if turn % 7 == 0:
        return [_result(turn - 1, _text(f"row {turn} found"))]
    return [_result(turn - 1, _image(shot(turn)))]


def _omniparser_seen(turn: int, shot: Shot) -> list[Message]:
    screen = _user(_text(f"button {turn}: row {turn}"))
    if turn == 0:
        return [screen]
    if turn % 7 == 0:
        return [_result(turn - 1, _text("no such button")), screen]
    changed = [_text("The window has changed.")] if turn % 3 else []
    return [_result(turn - 1, *changed, _image(shot(turn))), screen]


def _of_results(removes: Any) -> Callable[[int, int], EditPolicy]:
    def rule(n: int, batch: int) -> EditPolicy:
        return policies.keep_last_images(n, of="results", batch=batch, removes=removes)

    return rule


def _last(n: int, batch: int) -> EditPolicy:
    return policies.keep_last_images(n, batch=batch)


AGENTS = (
    Agent(
        "UI-TARS",
        lambda shot: [{"role": "user", "content": "Sort the list of files by their names."}],
        lambda turn, shot: [_user(_image(shot(turn)))],
        _spoken,
        _last,
    ),
    Agent(
        "cua",
        lambda shot: [_user(_text("Open the list and sort it."), _image(shot(200)))],
        _cua_seen,
        _called,
        _of_results("step"),
    ),
    Agent(
        "Agent-S",
        lambda shot: [{"role": "system", "content": [_text("You plan.")]}],
        lambda turn, shot: [_user(_text(f"Notes at step {turn}."), _image(shot(turn)))],
        _listed,
        _last,
    ),
    Agent(
        "AutoGLM",
        lambda shot: [{"role": "system", "content": "You use a phone."}],
        lambda turn, shot: [_user(_image(shot(turn)), _text(f"The app of step {turn} is open."))],
        _spoken,
        _last,
    ),
    Agent(
        "OmniParser",
        lambda shot: [_user(_text("Sort the list."), _image(shot(200)))],
        _omniparser_seen,
        _called,
        _of_results("picture"),
        batch=10,
    ),
    Agent(
        "smolagents",
        lambda shot: [
            {"role": "system", "content": [_text("You write code.")]},
            _user(_text("Find the largest file.")),
        ],
        lambda turn, shot: [_user(_image(shot(turn)), _text(f"Observed at step {turn}."))] if turn else [],
        _listed,
        _last,
    ),
)
