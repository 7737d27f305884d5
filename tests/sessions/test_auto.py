"""The mode "auto" takes the cheapest plan whose KV the policy's minimum admits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera import ChunkStore
from kamera.edits import policies
from kamera.sessions import ChatSession
from kamera.trust import at_least
from tests.content.templates import screens
from tests.sessions.rig import EXACT, FULL, seeing

GREEDY = {"max_new_tokens": 1, "do_sample": False}
BEFORE, AFTER = screens(3), policies.keep_last_images(1)(screens(4), 0)


def _edited(mode, policy, store=None, before=BEFORE, after=AFTER):
    chat = ChatSession(seeing(), store or ChunkStore.open("memory://"), mode=mode, policy=policy)
    chat.mode = "repair"
    chat.send(before, **GREEDY)
    chat.mode = mode
    return chat, chat.send(after, **GREEDY).report


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("minimum", "mode"), [("exact", "forget"), ("survivor", "amortize"), ("near", "amortize")]
)
def test_auto_takes_what_the_minimum_admits(minimum, mode):
    policy = EXACT if minimum == "exact" else replace(FULL, minimum=minimum)
    _, report = _edited("auto", policy, after=policies.keep_last_images(1)(BEFORE, 0))
    assert report.mode == mode
    assert at_least(report.guarantee, minimum)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("on_miss", "after"),
    [("form", screens(3)[::-1][:2]), ("prefill", [*screens(1), *screens(2, first=7)[1:]])],
    ids=["form", "prefill"],
)
def test_auto_costs_no_more_than_repair_or_forget(on_miss, after):
    policy = replace(FULL, on_miss=on_miss)
    auto = _edited("auto", policy, after=after)[1]
    others = [_edited(mode, policy, after=after)[1] for mode in ("repair", "forget")]
    assert auto.tokens_recomputed <= min(other.tokens_recomputed for other in others)
