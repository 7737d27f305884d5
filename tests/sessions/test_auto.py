"""The mode "auto" takes the cheapest plan whose KV the policy's minimum admits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera import ChunkStore
from kamera.edits import Directive, policies
from kamera.sessions import ChatSession
from kamera.trust import at_least
from tests.content.templates import screens
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, FULL, plain_logits, seeing, session

GREEDY = {"max_new_tokens": 1, "do_sample": False}
BEFORE, AFTER = screens(3), policies.keep_last_images(1)(screens(4), 0)


def _edited(mode, policy, store=None, before=BEFORE, after=AFTER):
    chat = ChatSession(seeing(), store or ChunkStore.open("memory://"), mode=mode, policy=policy)
    chat.mode = "repair"
    chat.send(before, **GREEDY)
    chat.mode = mode
    return chat, chat.send(after, **GREEDY).report


@pytest.mark.parametrize(
    ("minimum", "mode"), [("exact", "forget"), ("survivor", "amortize"), ("near", "amortize")]
)
def test_auto_takes_what_the_minimum_admits(minimum, mode):
    policy = EXACT if minimum == "exact" else replace(FULL, minimum=minimum)
    _, report = _edited("auto", policy, after=policies.keep_last_images(1)(BEFORE, 0))
    assert report.mode == mode
    assert at_least(report.guarantee, minimum)


def test_survivors_are_not_admitted_by_a_patched_minimum():
    chat, report = _edited("auto", FULL)
    assert report.mode != "amortize" and at_least(report.guarantee, "patched")
    assert relative(chat.next_token_logits(AFTER), plain_logits(seeing(), AFTER)) <= 1e-3


def test_an_edit_behind_which_nothing_stands_is_free_under_any_minimum():
    _, report = _edited("auto", FULL, after=BEFORE[:-1])
    assert report.forwards == 0 and report.guarantee == "exact"


def test_stored_patches_make_repair_the_cheapest():
    store = ChunkStore.open("memory://")
    first = _edited("repair", FULL, store)[1]
    again = _edited("repair", FULL, store)[1]
    auto = _edited("auto", FULL, store)[1]
    assert first.forwards > 0 == again.forwards and again.patched > 0
    assert (auto.mode, auto.forwards, auto.patched) == ("repair", 0, again.patched)


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


def test_a_named_mode_is_the_least_that_auto_may_take_beside_it():
    chat = session(seeing(), replace(FULL, minimum="survivor"), mode="amortize")
    chat.send(BEFORE, **GREEDY)
    auto = Directive(1, 2, unit="messages", mode="auto")
    assert chat.fork().edit([auto]).mode == "amortize"
    report = chat.edit([auto, Directive(3, 4, unit="messages", mode="repair")])
    assert report.mode in ("repair", "forget") and at_least(report.guarantee, "patched")
