"""Conversations that are appended to, or whose last N pictures stay, on the shipped backbone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.price.counting import watching
from kamera import ChatSession, ChunkStore, ReusePolicy, testbed
from kamera.content import common_prefix
from kamera.edits import EditPolicy, policies
from kamera.engines.hf import HfEngine

ANSWER = 4
SESSIONS: dict[str, dict[str, Any]] = {
    "exact": {"policy": ReusePolicy.exact(), "mode": "forget"},
    "default": {},
}
"""Options of a session by the name of a row."""


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each conversation and session."""
    backbone = HfEngine(*testbed.load())
    for name, (messages, edit) in conversations(options.turns, options.pictures).items():
        for policy, given in SESSIONS.items():
            store = ChunkStore.open("memory://")
            session = ChatSession(backbone, store, edit_policy=edit, **given)
            counted = run(backbone, session, messages)
            yield {"conversation": name, "policy": policy, "turns": len(messages), **counted}


def run(backbone: HfEngine, session: ChatSession, messages: list[dict[str, Any]]) -> report.Row:
    """Forwards and tokens of a conversation, turn by turn, beside a prefix cache and one that never forgets.

    ``plain`` runs each token of the conversation once, answers included: compare it with ``whole``.
    """
    before: list[int] = []
    first, prefix, plain = [0, 0], [0, 0], [0, 0]
    with watching(backbone) as whole:
        for message in messages:
            start = len(whole.spans)
            session.send(message, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
            asked = whole.mine(start)[: 1 - ANSWER]  # background work may run beside the answer
            session.flush()
            prompt = session.prompt_ids.tolist()
            new = len(prompt) - common_prefix(before, prompt)
            pairs = ((first, len(asked), sum(asked)), (prefix, 1, new), (plain, ANSWER, new + ANSWER - 1))
            for into, forwards, tokens in pairs:
                into[0] += forwards
                into[1] += tokens
            before = prompt
    return {
        "first, forwards": first[0],
        "first, tokens": first[1],
        "prefix cache, tokens": prefix[1],
        "whole, forwards": whole.counts[0],
        "whole, tokens": whole.counts[1],
        "plain, forwards": plain[0],
        "plain, tokens": plain[1],
    }


def conversations(turns: int, kept: list[int]) -> dict[str, tuple[list[dict[str, Any]], EditPolicy | None]]:
    """Messages and edit policy by name."""
    world = testbed.World(seed=0)
    frames = [f.image for e in range(1 + turns // 6) for f in world.episode(e, legends=6).frames][:turns]
    shown = [
        {"role": "user", "content": [{"type": "image", "image": f}, {"type": "text", "text": "tag 3?"}]}
        for f in frames
    ]
    told = [{"role": "user", "content": f"value of tag {n}?"} for n in range(turns)]
    return {
        "pictures, appended": (shown, None),
        "text, appended": (told, None),
        **{f"last {n} pictures": (shown, policies.keep_last_images(n)) for n in kept},
    }
