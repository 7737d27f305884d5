"""Policies make the edits that agents make, and a bad one is caught before it does harm."""

from __future__ import annotations

import itertools

import pytest

from kamera.content import Conversations
from kamera.edits import difference, edited, policies
from kamera.errors import EditPolicyFailed
from tests.content import templates
from tests.content.templates import AGENT, screens

_COUNT = itertools.count()


def _images(messages) -> list:
    return [i["image"] for m in messages for i in m["content"] if isinstance(i, dict) and "image" in i]


def test_the_last_images_stay_and_the_oldest_leave():
    messages = screens(5)
    out = edited(policies.keep_last_images(2), messages, 0)
    assert _images(out) == _images(messages)[3:]
    assert len(out) == len(messages) and out[1]["content"] == [{"type": "text", "text": "step 0"}]


def test_a_placeholder_stands_where_a_picture_stood():
    out = edited(policies.keep_last_images(0, "[omitted]"), screens(1), 0)
    assert out[1]["content"][1] == {"type": "text", "text": "[omitted]"}


def test_a_message_of_nothing_but_a_picture_goes_whole():
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]}
    out = edited(policies.keep_last_images(0), [message, {"role": "user", "content": "hi"}], 0)
    assert out == [{"role": "user", "content": "hi"}]


def test_batched_eviction_waits_until_a_batch_can_go():
    policy = policies.keep_last_images(1, batch=3)
    assert [len(_images(edited(policy, screens(n), 0))) for n in (2, 3, 4, 5)] == [2, 3, 1, 2]


def test_whole_turns_leave_with_their_pictures_and_their_calls():
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        *screens(1)[:2],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": [{"type": "image", "image": templates.picture(7)}]},
        *screens(3)[3:],
    ]
    out = edited(policies.keep_last_images(2, whole_turns=True), messages, 0)
    assert out == [messages[0], *messages[4:]]
    assert edited(policies.keep_last_images(3, whole_turns=True), messages, 0) == [messages[0], *messages[2:]]
    with pytest.raises(ValueError, match="placeholder"):
        policies.keep_last_images(2, "x", whole_turns=True)


def test_old_tool_results_keep_their_head_and_tail():
    messages = [{"role": "tool", "content": f"{i}" + "x" * 300 + "end"} for i in range(3)]
    out = edited(policies.truncate_tool_results(1, head=4, tail=5), messages, 0)
    assert out[0]["content"] == "0xxx\n[295 characters cut]\nxxend" and out[2] == messages[2]
    assert len({len(m["content"]) for m in out[:2]}) == 1
    short = [{"role": "tool", "content": "short"}, messages[0]]
    assert edited(policies.truncate_tool_results(1, head=1, tail=1), short, 0) == short


def test_a_sliding_window_of_images_is_one_removal_a_turn():
    conversations, policy = Conversations(templates.seeing()), policies.keep_last_images(3)
    for turn in range(4, 8):
        before = conversations.render(edited(policy, screens(turn), turn))
        after = conversations.render(edited(policy, screens(turn + 1), turn + 1))
        change = difference(before, after)
        gone = [before.segments[i] for i in change.removed]
        assert [s.kind for s in gone if s.media] == ["image"]
        assert sum(s.num_tokens for s in gone if not s.media) < 40  # the question that was last


def test_old_tool_results_are_cleared_but_the_latest():
    out = edited(policies.clear_tool_results(1, placeholder="-"), AGENT, 0)
    assert [m["content"] for m in out if m["role"] == "tool"] == ["-", AGENT[3]["content"]]
    assert out[1] == AGENT[1]


def test_tool_results_stay_below_the_trigger_and_when_excluded():
    for policy in (
        policies.clear_tool_results(0, trigger=10_000),
        policies.clear_tool_results(1, exclude={"read"}),
    ):
        out = edited(policy, AGENT, 0)
        assert out[2] == AGENT[2]


def test_thinking_leaves_text_and_fields():
    messages = [*AGENT, {"role": "assistant", "content": "ok", "reasoning_content": "hm"}]
    out = edited(policies.strip_thinking(), messages, 0)
    assert out[1]["content"] == "I read it." and out[4]["content"] == "Done."
    assert "reasoning_content" not in out[-1]
    assert edited(policies.strip_thinking(keep_last=1), messages, 0)[-1] == messages[-1]


def test_a_failed_call_is_removed_after_a_later_success():
    def call(n: str) -> dict:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": n, "type": "function", "function": {"name": "edit", "arguments": {}}}],
        }

    failed, good = (
        {"role": "tool", "tool_call_id": n, "content": t} for n, t in (("1", "Error: no"), ("2", "ok"))
    )
    start = {"role": "user", "content": "go"}
    policy = policies.drop_failed_tool_calls()
    assert edited(policy, [start, call("1"), failed, call("2"), good], 0) == [start, call("2"), good]
    assert edited(policy, [start, call("1"), failed], 0) == [start, call("1"), failed]


def test_ends_stay_and_results_go_with_their_calls():
    out = edited(policies.keep_ends(0, 3), AGENT, 0)
    assert [m["role"] for m in out] == ["assistant", "tool", "tool", "assistant", "user"]
    assert edited(policies.keep_ends(0, 2), AGENT, 0) == AGENT[4:]


def test_a_summary_stands_where_the_middle_stood():
    out = edited(policies.summarise(1, 1, lambda gone: f"{len(gone)} went"), AGENT, 0)
    assert out == [AGENT[0], {"role": "user", "content": "4 went"}, AGENT[5]]


def test_keeping_all_changes_nothing():
    assert edited(policies.keep_all(), AGENT, 3) == AGENT


def _raises(messages, turn):
    raise KeyError("x")


def _writes(messages, turn):
    messages[0]["role"] = "user"
    return messages


def _wavers(messages, turn):
    return [*messages, {"role": "user", "content": str(next(_COUNT))}]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (_raises, "raised KeyError"),
        (lambda m, t: "hello", "returned str"),
        (lambda m, t: [{"content": "no role"}], "a dict with a role"),
        (lambda m, t: [], "left no message"),
        (_writes, "modified the messages"),
        (_wavers, "gives two results"),
    ],
    ids=["raises", "text", "no role", "empty", "writes", "wavers"],
)
def test_a_bad_policy_is_named_and_changes_nothing(policy, says):
    messages = screens(1)
    before = [dict(m) for m in messages]
    with pytest.raises(EditPolicyFailed, match=says):
        edited(policy, messages, 0)
    assert messages == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: policies.keep_last_images(-1),
        lambda: policies.clear_tool_results(-1),
        lambda: policies.strip_thinking(keep_last=-1),
        lambda: policies.keep_ends(0, 0),
        lambda: policies.summarise(-1, 1),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make):
    with pytest.raises(ValueError):
        make()
