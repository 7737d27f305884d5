"""A policy that is none is refused where it is given, by name and with the way out."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, KameraWindow, ReusePolicy
from kamera.reuse import Reuser
from kamera.sessions import SessionPool
from kamera.window import Append
from tests.sessions.rig import speaking

PLACES = {
    "window": lambda policy, to: KameraWindow(
        speaking("headers"), ChunkStore.open("memory://"), policy=policy
    ),
    "window that repairs": lambda policy, to: KameraWindow(
        speaking("headers"), ChunkStore.open("memory://"), policy=policy, on_leave="repair"
    ),
    "session": lambda policy, to: ChatSession(
        speaking("headers"), ChunkStore.open("memory://"), policy=policy
    ),
    "pool": lambda policy, to: SessionPool(speaking("headers"), ChunkStore.open("memory://"), policy=policy),
    "pool that saves": lambda policy, to: SessionPool(
        speaking("headers"), ChunkStore.open("memory://"), policy=policy, save=to
    ),
    "reuser": lambda policy, to: Reuser(speaking("headers"), ChunkStore.open("memory://"), policy),
    "plan": lambda policy, to: KameraWindow(
        speaking("headers"), ChunkStore.open("memory://"), policy=ReusePolicy.exact()
    ).plan(Append("a text"), policy=policy),
}
WRONG = {
    "name": ("streaming", "policy 'streaming' is no ReusePolicy: give ReusePolicy()"),
    "upper": ("EXACT", "policy 'EXACT' is no ReusePolicy: give ReusePolicy.exact()"),
    "uncalled": (
        ReusePolicy.balanced,
        "policy ReusePolicy.balanced is not called: give ReusePolicy()",
    ),
    "class": (ReusePolicy, "policy ReusePolicy is not called: give ReusePolicy()"),
    "guarantee": ("patched", "policy 'patched' is no ReusePolicy: give ReusePolicy.exact(), ReusePolicy"),
    "dict": ({"minimum": "exact"}, "is no ReusePolicy"),
    "True": (True, "policy True is no ReusePolicy"),
    "empty": ("", "policy '' is no ReusePolicy"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_policy_is_named(place, wrong, tmp_path):
    given, says = WRONG[wrong]
    with pytest.raises(ValueError) as caught:
        PLACES[place](given, tmp_path / "saved")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_policy_or_none_is_taken(place, tmp_path):
    for policy in (None, ReusePolicy.exact(), ReusePolicy()):
        assert PLACES[place](policy, tmp_path / "saved") is not None
