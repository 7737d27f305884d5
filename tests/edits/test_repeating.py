"""A client's own edit, repeated: the same change of shape, as far from the end of the history."""

from __future__ import annotations

from typing import Any

import pytest

from kamera.edits import Foreseen, policies, repeated


def turn(number: int) -> list[dict[str, Any]]:
    """A picture with a text, and an answer."""
    content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"step {number}"}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": f"done {number}"}]


def talk(*numbers: int) -> list[dict[str, Any]]:
    return [message for number in numbers for message in turn(number)]


def answered(client, turns: int) -> tuple[list, list, list]:
    """The last turn of a client that edits its history: before it, as given, and with the answer."""
    before: list[dict[str, Any]] = []
    for number in range(turns):
        given = client([*before, turn(number)[0]])
        last, before = (before, given), [*given, turn(number)[1]]
    return *last, before


@pytest.mark.parametrize(
    "client",
    [
        policies.keep_last_images(2),
        policies.keep_last_images(2, placeholder="[gone]"),
        lambda messages, _: list(messages)[-5:],
    ],
    ids=["pictures", "placeholders", "oldest turn"],
)
def test_an_edit_that_a_client_makes_each_turn_is_foretold(client):
    for turns in (4, 5, 6):
        before, given, history = answered(lambda messages: client(messages, 0), turns)
        coming = turn(turns)[0]
        found = repeated(before, given, history)
        assert found is not None
        assert [*found.messages, coming] == client([*history, coming], 0)
        assert found.known == len(found.messages)


def test_a_history_that_only_grows_has_no_edit_to_repeat():
    assert repeated(talk(0), [*talk(0), turn(1)[0]], talk(0, 1)) is None
    assert repeated([], [turn(0)[0]], talk(0)) is None


def test_what_follows_a_change_by_content_is_not_known():
    before, history = talk(0, 1), talk(0, 1, 2)
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    given = [*talk(0), turn(1)[0], call, turn(2)[0]]
    found = repeated(before, given, history)
    assert found == Foreseen(history, 5), "what becomes of the last answer cannot be told"


def test_a_cleared_text_is_cleared_again_and_a_picture_of_another_shape_is_left_unknown():
    texts = [{"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")]
    cleared = [{"role": "user", "content": "[cleared]"}, *texts[1:4], texts[4]]
    assert repeated(texts[:4], cleared, [*cleared, texts[5]]) == Foreseen(
        [cleared[0], texts[1], {"role": "user", "content": "[cleared]"}, *texts[3:]], 6
    )
    emptied = [{**turn(0)[0], "content": turn(0)[0]["content"][1:]}, *talk(0, 1)[1:], texts[0]]
    history = [*emptied[:1], *emptied[1:2], texts[2], emptied[3], *texts[:2]]
    found = repeated(talk(0, 1), emptied, history)
    assert found is not None
    assert (found.messages, found.known) == (history, 2)
