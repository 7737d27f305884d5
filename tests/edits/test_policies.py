"""Policies make the edits that agents make, and a bad one is caught before it does harm."""

from __future__ import annotations

import itertools

import pytest

from kamera.content import Conversations
from kamera.edits import apply_policy, difference, policies
from kamera.errors import EditPolicyFailed
from tests.content import templates
from tests.content.templates import AGENT, screens

_COUNT = itertools.count()


def _images(messages) -> list:
    return [i["image"] for m in messages for i in m["content"] if isinstance(i, dict) and "image" in i]


def test_the_last_images_stay_and_the_oldest_leave():
    messages = screens(5)
    out = apply_policy(policies.keep_last_images(2), messages, 0)
    assert _images(out) == _images(messages)[3:]
    assert len(out) == len(messages) and out[1]["content"] == [{"type": "text", "text": "step 0"}]


def test_batched_eviction_waits_until_a_batch_can_go():
    policy = policies.keep_last_images(1, batch=3)
    assert [len(_images(apply_policy(policy, screens(n), 0))) for n in (2, 3, 4, 5)] == [2, 3, 1, 2]


def _call(name: str, text: str = "") -> dict:
    call = {"id": name, "type": "function", "function": {"name": "look", "arguments": {}}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def _shown(name: str, seed: int) -> dict:
    picture = {"type": "image", "image": templates.picture(seed)}
    return {"role": "tool", "tool_call_id": name, "content": [picture]}


def test_messages_leave_with_their_pictures_and_their_calls():
    messages = [*screens(1)[:2], _call("c0"), _shown("c0", 7), *screens(3)[3:]]
    out = apply_policy(policies.keep_last_images(2, removes="call"), messages, 0)
    assert out == [messages[0], *messages[4:]]
    assert apply_policy(policies.keep_last_images(3, removes="call"), messages, 0) == [
        messages[0],
        *messages[2:],
    ]


def test_of_parallel_calls_only_the_answered_one_leaves():
    both = {**_call("a"), "tool_calls": [*_call("a")["tool_calls"], *_call("b")["tool_calls"]]}
    messages = [{"role": "user", "content": "look"}, both, _shown("a", 0), _shown("b", 1)]
    out = apply_policy(policies.keep_last_images(1, removes="step"), messages, 0)
    assert out[1:] == [_call("b"), messages[3]]


def test_old_tool_results_keep_their_head_and_tail():
    messages = [{"role": "tool", "content": f"{i}" + "x" * 300 + "end"} for i in range(3)]
    out = apply_policy(policies.truncate_tool_results(1, head=4, tail=5), messages, 0)
    assert out[0]["content"] == "0xxx\n[295 characters cut]\nxxend" and out[2] == messages[2]
    assert len({len(m["content"]) for m in out[:2]}) == 1
    short = [{"role": "tool", "content": "short"}, messages[0]]
    assert apply_policy(policies.truncate_tool_results(1, head=1, tail=1), short, 0) == short


def test_a_sliding_window_of_images_is_one_removal_a_turn():
    conversations, policy = Conversations(templates.seeing()), policies.keep_last_images(3)
    for turn in range(4, 8):
        before = conversations.render(apply_policy(policy, screens(turn), turn))
        after = conversations.render(apply_policy(policy, screens(turn + 1), turn + 1))
        change = difference(before, after)
        gone = [before.segments[i] for i in change.removed]
        assert [s.kind for s in gone if s.media] == ["image"]
        assert sum(s.num_tokens for s in gone if not s.media) < 40  # the question that was last


def test_old_tool_results_are_cleared_but_the_latest():
    out = apply_policy(policies.clear_tool_results(1, placeholder="-"), AGENT, 0)
    assert [m["content"] for m in out if m["role"] == "tool"] == ["-", AGENT[3]["content"]]
    assert out[1] == AGENT[1]


def test_tool_results_stay_below_the_trigger_and_when_excluded():
    for policy in (
        policies.clear_tool_results(0, trigger=10_000),
        policies.clear_tool_results(1, exclude={"read"}),
    ):
        out = apply_policy(policy, AGENT, 0)
        assert out[2] == AGENT[2]


def test_thinking_leaves_text_and_fields():
    messages = [*AGENT, {"role": "assistant", "content": "ok", "reasoning_content": "hm"}]
    out = apply_policy(policies.strip_thinking(), messages, 0)
    assert out[1]["content"] == "I read it." and out[4]["content"] == "Done."
    assert "reasoning_content" not in out[-1]
    assert apply_policy(policies.strip_thinking(keep_last=1), messages, 0)[-1] == messages[-1]


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
    assert apply_policy(policy, [start, call("1"), failed, call("2"), good], 0) == [start, call("2"), good]
    assert apply_policy(policy, [start, call("1"), failed], 0) == [start, call("1"), failed]
    whole = [start, call("1"), failed, call("2"), good]
    assert apply_policy(policies.drop_failed_tool_calls(keep_last=3), whole, 0) == whole, (
        "of two calls three stay"
    )


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
        apply_policy(policy, messages, 0)
    assert messages == before
