"""Recorded-style sessions from a seed: what an agent's client sends, turn by turn, before its rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from kamera.edits import EditPolicy, PolicyFunction, policies

Message = dict[str, Any]
_WORDS = [
    "open",
    "save",
    "file",
    "test",
    "error",
    "window",
    "button",
    "list",
    "page",
    "result",
    "value",
    "line",
    "check",
    "build",
    "name",
    "path",
]


@dataclass(frozen=True)
class Agent:
    """A session's script, the rule that its agent keeps, and the same rule in batches, if it has such."""

    name: str
    script: Callable[[random.Random, int], Iterator[list[Message]]]
    rule: EditPolicy
    batched: EditPolicy


def text_of(draw: random.Random, lines: int) -> str:
    return "\n".join(" ".join(draw.choices(_WORDS, k=draw.randint(5, 11))) + "." for _ in range(lines))


def picture_of(draw: random.Random, side: int = 112) -> Image.Image:
    """A screenshot of its own: blocks of colour."""
    blocks = np.random.default_rng(draw.randrange(2**32)).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((side, side), Image.Resampling.NEAREST)


def _user(draw: random.Random, text: str, picture: bool) -> Message:
    items: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture:
        items.append({"type": "image", "image": picture_of(draw)})
    return {"role": "user", "content": items}


def _system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}]


def screens(draw: random.Random, steps: int) -> Iterator[list[Message]]:
    """A screenshot, an action, a screenshot, …"""
    history = _system("You use a computer. " + text_of(draw, 4))
    for step in range(steps):
        history.append(_user(draw, f"Step {step}.", True))
        yield list(history)
        history.append({"role": "assistant", "content": f"click({draw.randrange(99)}, {draw.randrange(99)})"})


def coding(draw: random.Random, steps: int) -> Iterator[list[Message]]:
    """Tool calls with long results, every third of which fails and is tried again."""
    history = [*_system("You mend code. " + text_of(draw, 4)), _user(draw, "Mend the build.", False)]
    for step in range(steps):
        yield list(history)
        call = {"id": f"c{step}", "type": "function", "function": {"name": "edit", "arguments": {}}}
        history.append({"role": "assistant", "content": f"edit {step}", "tool_calls": [call]})
        failed = step % 3 == 0
        said = "Error: no match\n" + text_of(draw, 2) if failed else text_of(draw, 12)
        history.append({"role": "tool", "tool_call_id": f"c{step}", "content": said})


def browsing(draw: random.Random, steps: int) -> Iterator[list[Message]]:
    """A screenshot and the text of a page each step."""
    history = _system("You browse. " + text_of(draw, 4))
    for _ in range(steps):
        history.append(_user(draw, text_of(draw, 5), True))
        yield list(history)
        history.append({"role": "assistant", "content": "go to " + text_of(draw, 1)})


def thinking(draw: random.Random, steps: int) -> Iterator[list[Message]]:
    """Answers with thinking in front, which the rule strips from the history."""
    history = _system("You think. " + text_of(draw, 4))
    for step in range(steps):
        history.append(_user(draw, f"Question {step}: " + text_of(draw, 2), False))
        yield list(history)
        said = f"<think>\n{text_of(draw, 8)}\n</think>\n\n{text_of(draw, 2)}"
        history.append({"role": "assistant", "content": said})


def watching(draw: random.Random, steps: int) -> Iterator[list[Message]]:
    """A frame a turn, and now and then a question."""
    history = _system("You watch a camera.")
    for step in range(steps):
        history.append(_user(draw, f"t={step}", True))
        yield list(history)
        history.append({"role": "assistant", "content": "ok" if step % 4 else text_of(draw, 1)})


def spoken(rule: PolicyFunction) -> PolicyFunction:
    """``rule``, then the calls as their messages say them: the shipped template shows no ``tool_calls``."""

    def spoken(messages: Sequence[Mapping[str, Any]], turn: int) -> list[dict[str, Any]]:
        kept = rule(messages, turn)
        return [{name: value for name, value in m.items() if name != "tool_calls"} for m in kept]

    return spoken


AGENTS = (
    Agent("cua", screens, policies.keep_last_images(3), policies.keep_last_images(3, batch=8)),
    Agent("Agent-S", screens, policies.keep_last_images(9), policies.keep_last_images(9, batch=8)),
    Agent("Open-AutoGLM", screens, policies.keep_last_images(1), policies.keep_last_images(1, batch=8)),
    Agent("UI-TARS", screens, policies.keep_last_images(5), policies.keep_last_images(5, batch=8)),
    Agent(
        "Agent-TARS",
        screens,
        policies.keep_last_images(5, "[Image omitted to conserve context]"),
        policies.keep_last_images(5, "[Image omitted to conserve context]", batch=8),
    ),
    Agent(
        "OmniParser", screens, policies.keep_last_images(2, batch=10), policies.keep_last_images(2, batch=10)
    ),
    Agent("Anthropic demo", screens, policies.keep_all(), policies.keep_all()),
    Agent(
        "clear_tool_uses",
        coding,
        spoken(policies.clear_tool_results(3)),
        spoken(policies.clear_tool_results(3, trigger=6_000)),
    ),
    Agent(
        "Leyline debug-gym",
        coding,
        spoken(policies.truncate_tool_results(2)),
        spoken(policies.truncate_tool_results(2)),
    ),
    Agent("compacting coder", coding, spoken(policies.summarise(2, 6)), spoken(policies.summarise(2, 6))),
    Agent(
        "retry",
        coding,
        spoken(policies.drop_failed_tool_calls()),
        spoken(policies.drop_failed_tool_calls(keep_last=4)),
    ),
    Agent("smolagents", browsing, policies.keep_last_images(2), policies.keep_last_images(2, batch=8)),
    Agent("Qwen3", thinking, policies.strip_thinking(), policies.strip_thinking()),
    Agent("video watcher", watching, policies.keep_last_images(8), policies.keep_last_images(8, batch=8)),
)
"""Agents by name, each under its rule (docs/edits.md), as far as a script without calls shows it.

The pictures stand in users' messages beside text, so that all are counted and each leaves alone.
"""
