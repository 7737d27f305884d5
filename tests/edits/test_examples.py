"""A client's own rule, which no policy of ours is, is found by the first edit that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kamera.edits import Client
from tests.edits.test_clients import foretold, turns

Messages = list[dict[str, Any]]
Rule = Callable[[Messages], Messages]


def pages(length: int) -> Messages:
    """Answers that open pages, and pages of different lengths, each behind a first request."""
    full = [{"role": "system", "content": "You read."}, {"role": "user", "content": "Read all."}]
    for i in range(length):
        full.append({"role": "assistant", "content": f"Open page {i + 1}."})
        full.append({"role": "user", "content": f"Page {i + 1}:\n{'word ' * (i % 5 + 20)}end {i}"})
    return full


def chat(length: int) -> Messages:
    """Exchanges; each answer begins with its thinking, in the text and in a field."""
    full: Messages = [{"role": "system", "content": "You help."}]
    for i in range(length):
        thought = f"<think>\nwhat is {i}?\n</think>\n\n"
        full.append({"role": "user", "content": f"What is {i}?"})
        full.append({"role": "assistant", "content": f"{thought}It is {i}.", "reasoning_content": f"{i}?"})
    full.append({"role": "user", "content": "And now?"})
    return full


def calls(length: int, plain: bool = False) -> Messages:
    """Calls of a tool; unless ``plain`` each third turn has two, and each fourth result shows a picture."""
    full: Messages = [{"role": "user", "content": "Sort the list."}]
    for i in range(length):
        names = [f"c{i}", f"d{i}"] if i % 3 == 2 and not plain else [f"c{i}"]
        made = [{"id": n, "type": "function", "function": {"name": "look", "arguments": n}} for n in names]
        full.append({"role": "assistant", "content": f"Step {i}.", "tool_calls": made})
        for n in names:
            text: Any = f"row {n}: " + "x" * (i + 40)
            if i % 4 == 3 and not plain:
                text = [{"type": "image", "image": n}, {"type": "text", "text": text}]
            full.append({"role": "tool", "tool_call_id": n, "content": text})
    return full


def of(role: str, keep: int, change: Callable[[dict[str, Any], int], dict[str, Any] | None]) -> Rule:
    """All of a role but the first page's request and the last ``keep``, changed; None: removed."""

    def rule(full: Messages) -> Messages:
        own = [i for i, m in enumerate(full) if m["role"] == role and m["content"] != "Read all."]
        old = own[: max(0, len(own) - keep)]
        out = [change(m, old.index(i) + 1) if i in old else m for i, m in enumerate(full)]
        return [m for m in out if m is not None]

    return rule


def exchanges(keep: int, note: Callable[[Messages], str] | None = None) -> Rule:
    """The last ``keep`` exchanges, with a note on what left before them."""

    def rule(full: Messages) -> Messages:
        asked = [i for i, m in enumerate(full) if m["role"] == "user"]
        if len(asked) <= keep:
            return full
        gone = full[1 : asked[-keep]]
        said = [] if note is None else [{"role": "user", "content": note(gone)}]
        return [full[0], *said, *full[asked[-keep] :]]

    return rule


def with_text(text: str) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    return lambda m, i: {**m, "content": text.format(i=i, n=len(str(m["content"])))}


def without_thinking(message: dict[str, Any], _: int) -> dict[str, Any]:
    text = re.sub(r"<think>.*?</think>\s*", "", message["content"], flags=re.DOTALL)
    return {"role": "assistant", "content": text}


def without_picture(message: dict[str, Any], _: int) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "text", "text": "[gone]"}, message["content"][1]]}


def drop_pages(full: Messages) -> Messages:
    return [*full[:2], *full[2:][max(0, (len(full) - 2) // 2 - 3) * 2 :]]


def in_batches(full: Messages) -> Messages:
    """Two exchanges leave at once, when there are five."""
    asked = [i for i, m in enumerate(full) if m["role"] == "user"]
    gone = max(0, len(asked) - 3) // 2 * 2
    return [full[0], *full[asked[gone] :]]


CLIENTS: dict[str, tuple[Messages, Rule]] = {
    "oldest exchange dropped": (chat(14), exchanges(3)),
    "oldest page dropped": (pages(14), drop_pages),
    "page replaced": (pages(14), of("user", 3, with_text("(removed)"))),
    "page replaced, numbered": (pages(14), of("user", 3, with_text("(page {i} was removed)"))),
    "page replaced, with its length": (pages(14), of("user", 2, with_text("[{n} characters]"))),
    "page shortened": (pages(14), of("user", 2, lambda m, _: {**m, "content": m["content"][:60] + " …"})),
    "page's first line": (
        pages(14),
        of("user", 2, lambda m, _: {**m, "content": m["content"].partition("\n")[0] + "\n(removed)"}),
    ),
    "messages counted": (chat(14), exchanges(2, lambda gone: f"{len(gone)} earlier messages removed")),
    "exchanges counted": (chat(14), exchanges(3, lambda gone: f"[{len(gone) // 2} exchanges left out]")),
    "a note that counts nothing": (chat(14), exchanges(3, lambda _: "[the 1 and only note]")),
    "thinking stripped": (chat(14), of("assistant", 1, without_thinking)),
    "tool results cleared": (calls(14), of("tool", 3, with_text("[cleared]"))),
    "tool results dropped": (calls(14), of("tool", 3, lambda m, _: None)),
    "exchanges dropped in batches": (chat(18), in_batches),
    "picture replaced": (calls(14), of("tool", 2, without_picture)),
}


@pytest.mark.few(11)
@pytest.mark.parametrize("name", CLIENTS)
def test_what_a_client_does_next_is_foretold_from_the_first_time_on(name):
    full, rule = CLIENTS[name]
    asked = [(full[:i], rule(full[:i])) for i in [*turns(full), len(full)]]
    found = foretold(Client(), asked)
    first = next(i for i, (whole, kept) in enumerate(asked) if whole != kept)
    assert not any(found[:first]), "nothing is known of it"
    assert len(found[first:]) >= 8
    assert found[first:].count(True) >= len(found[first:]) - 2
    assert found[-5:] == [True] * 5
