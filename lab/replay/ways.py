"""Ways of holding one conversation: policy and mode of a session, and what it does while its client acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.edits import EditPolicy
from kamera.engines.hf import HfEngine


@dataclass(frozen=True)
class Way:
    """A session's policy and mode; ``between`` runs after each answer."""

    policy: ReusePolicy
    mode: Any
    between: Callable[[ChatSession], None] = ChatSession.flush

    def session(self, backbone: HfEngine, rule: EditPolicy | None = None) -> ChatSession:
        """A session over a store of its own."""
        store = ChunkStore.open("memory://")
        return ChatSession(backbone, store, policy=self.policy, mode=self.mode, edit_policy=rule)


def anticipated(session: ChatSession) -> None:
    """Prepare the next prompt's window while the client acts, and all other later work."""
    session.anticipate()
    session.flush()


WAYS = {
    "exact": Way(ReusePolicy.exact(), "forget"),
    "default": Way(ReusePolicy(certified=True), "auto"),
    "anticipated": Way(ReusePolicy(certified=True), "auto", anticipated),
    "amortize": Way(ReusePolicy.streaming(), "amortize"),
}


def sampled(share: float) -> Way:
    """A share of the tokens of each picture that stays; the estimate refuses pictures of random weights."""
    return Way(ReusePolicy(minimum="sampled", share=share, max_error=1.0, certified=False), "repair")


SAMPLED = {"sampled": sampled(0.25), "sampled .15": sampled(0.15)}

REPAIR = Way(ReusePolicy.streaming(), "repair")
