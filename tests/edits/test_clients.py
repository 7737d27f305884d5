"""A client's rule is found from what it sends, and foretells what it sends next."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kamera.edits import Client, EditPolicy, policies, same
from tests.edits.test_recorded import NAMES, requests

Messages = list[dict[str, Any]]


class Picture:
    """Pixels with a name."""

    def __init__(self, name: str) -> None:
        self.name = name


drawn = functools.cache(Picture)
"""The one picture of a name: a client keeps those that it sends again."""


def pictured(value: Any, picture: Callable[[str], Picture] = drawn) -> Any:
    """Messages whose pictures are objects instead of names."""
    if isinstance(value, list):
        return [pictured(inner, picture) for inner in value]
    if not isinstance(value, dict):
        return value
    named = ("image", "url", "data", "image_url")
    return {
        k: picture(v) if k in named and isinstance(v, str) else pictured(v, picture) for k, v in value.items()
    }


def spelled(value: Any) -> Any:
    """Messages whose pictures are names again."""
    if isinstance(value, Picture):
        return value.name
    if isinstance(value, list | tuple):
        return [spelled(inner) for inner in value]
    return {k: spelled(v) for k, v in value.items()} if isinstance(value, dict) else value


def turns(full: Messages) -> Iterator[int]:
    """The lengths of a history when each of its answers was asked for."""
    for i, message in enumerate(full):
        if message.get("role") == "assistant" and i:
            yield i


def foretold(client: Client, requests: Sequence[tuple[Messages, Messages]]) -> list[bool | None]:
    """By request: was it foretold, by one that was told those before? None: nothing was said of it."""
    found: list[bool | None] = []
    before: Messages = []
    length = 0
    for full, kept in requests:
        new = full[length:]
        if before:
            # the session has its own form of the answer, which here is the client's
            answers = [m for m in new if m.get("role") == "assistant"]
            coming = [m for m in new if m.get("role") != "assistant"]
            guess = client.next(pictured(answers[-1]), pictured(coming))
            shown = None if guess is None else spelled(guess.messages[: guess.known])
            found.append(None if guess is None else shown == kept[: len(kept) - len(coming)])
            before = [*before, {"role": "assistant", "content": "as the model said it"}]
        given = pictured(kept)
        client = client.learn(before, given)
        before, length = given, len(full)
    return found


def converses(recorded: Sequence[tuple[Messages, Messages]]) -> bool:
    """True if each request has roles, and goes on from the answer to the one before."""
    lengths = [len(full) for full, _ in recorded[:-1]]
    pairs = zip(lengths, recorded[1:], strict=True)
    return all("role" in m for m in recorded[-1][0]) and all(
        [m["role"] == "assistant" for m in full[length:]].count(True) == 1 for length, (full, _) in pairs
    )


AGENTS = [name for name in NAMES if converses(requests(name))]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", AGENTS)
def test_what_a_recorded_agent_keeps_is_foretold_once_anything_has_left(name):
    recorded = requests(name)
    found = foretold(Client(), recorded)
    first = next((i for i, (full, kept) in enumerate(recorded) if full != kept), len(recorded))
    assert not any(found[: first - 1]), "nothing is known of it"
    assert all(found[first:]), "each one"


def talk(length: int) -> Messages:
    """Calls, each with a result; every fourth result is a text without a picture."""
    full: Messages = [{"role": "user", "content": [{"type": "text", "text": "Sort the list."}]}]
    for i in range(length):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": f"{i}"}}
        full.append({"role": "assistant", "content": f"Step {i}.", "tool_calls": [call]})
        shown = {"type": "text", "text": f"row {i}"} if i % 4 == 3 else {"type": "image", "image": f"p{i}"}
        full.append({"role": "tool", "tool_call_id": f"c{i}", "content": [shown]})
    return full


RULES: dict[str, EditPolicy] = {
    "picture": policies.keep_last_images(2),
    "placeholder": policies.keep_last_images(2, "[gone]"),
    "batch": policies.keep_last_images(2, batch=3),
    "results": policies.keep_last_images(1, of="results", batch=2),
    "call": policies.keep_last_images(2, removes="call"),
    "step": policies.keep_last_images(3, removes="step"),
    "ends": policies.keep_ends(1, 7),
    "cleared": policies.clear_tool_results(3, placeholder="[cleared]"),
}


def sent(rule: EditPolicy, full: Messages) -> list[tuple[Messages, Messages]]:
    return [(full[:i], rule(full[:i], 0)) for i in turns([*full, {"role": "assistant", "content": ""}])]


@pytest.mark.few(4)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_found_at_the_first_turn_that_shows_it(rule):
    asked = sent(rule, talk(24))
    found = foretold(Client(), asked)
    first = next(i for i, (full, kept) in enumerate(asked) if full != kept)
    assert found[: first - 1] == [None] * (first - 1) if first else True
    assert found[first:].count(False) <= 1, "two rules may look alike until something else leaves"
    assert found[-12:] == [True] * 12


def test_a_rule_that_no_policy_is_foretells_nothing_and_one_that_changes_is_found_again():
    full = talk(20)
    last = sent(lambda messages, _: messages[:: max(1, len(messages) // 5)], full)
    assert not any(foretold(Client(), last))
    one, other = sent(RULES["picture"], full), sent(RULES["placeholder"], full)
    found = foretold(Client(), [*one[:10], *other[10:]])
    assert found[8:10] == [True, False], "the rule of the turns before"
    assert found[-5:] == [True] * 5


def test_a_session_that_was_changed_otherwise_begins_anew():
    asked = sent(RULES["picture"], talk(8))
    client, before = Client(), []
    for _, kept in asked:
        client = client.learn(before, pictured(kept))
        before = [*pictured(kept), {"role": "assistant", "content": "so"}]
    assert client.rule is not None
    changed = client.learn(before[2:], pictured(asked[-1][1]))
    assert (changed.rule, len(changed.unedited)) == (None, len(asked[-1][1]))


def test_no_picture_is_kept_that_left():
    asked = sent(RULES["picture"], talk(8))
    client, before, seen = Client(), [], []
    for _, kept in asked:
        given = pictured(kept, Picture)  # decoded anew for each request
        items = [item for message in given for item in message["content"] if isinstance(item, dict)]
        seen += [weakref.ref(item["image"]) for item in items if "image" in item]
        client = client.learn(before, given)
        before = [*given, {"role": "assistant", "content": "so"}]
    del given, before, items
    gc.collect()
    assert sum(ref() is not None for ref in seen) == 2
    guess = client.next({"role": "assistant", "content": "so"}, [{"role": "user", "content": "now?"}])
    assert guess is not None and same(guess.messages[-1], {"role": "user", "content": "now?"})


def test_a_server_that_reads_texts_alone_as_one_text_foretells_as_the_client_sends_lists():
    """Where a picture leaves a list, a text is left; a server may give either form on."""
    rule = policies.keep_last_images(2)

    def joined(messages: Messages) -> Messages:
        made = []
        for message in messages:
            items = message["content"]
            if isinstance(items, list) and all(item["type"] == "text" for item in items):
                message = {**message, "content": "".join(item["text"] for item in items)}
            made.append(message)
        return made

    full: Messages = []
    for number in range(6):
        items = [{"type": "image", "image": drawn(str(number))}, {"type": "text", "text": f"step {number}"}]
        full += [{"role": "user", "content": items}, {"role": "assistant", "content": f"go {number}"}]
    plain = [(rule(full[:n], 0), full[n]) for n in turns(full)]
    read = [(joined(given), answer) for given, answer in plain]
    known: list[bool] = []
    client, before = Client(), []
    for given, answer in read:
        client = client.learn([*before], given)
        before = [*given, answer]
        known.append(client.rule is not None)
    assert known == [False, False, True, True, True, True]
