"""Random turns of sessions in the exact mode, each held against an uncached run of its whole prompt."""

from __future__ import annotations

import random
import time
from typing import Any

from kamera import Backbone, ChatSession, ChunkStore, ReusePolicy
from kamera.content import Conversations
from kamera.sessions.uncached import plain_logits
from lab.replay.scripts import picture_of, text_of

CLOSE = 1e-4
"""The largest relative difference of fp32 logits that is no divergence."""


def divergences(backbone: Backbone, turns: int, seed: int, seconds: float) -> dict[str, Any]:
    """Up to ``turns`` turns in at most ``seconds``: how many were run, and how many diverged."""
    draw = random.Random(seed)
    stop = time.monotonic() + seconds
    done, wrong, worst, sessions = 0, 0, 0.0, 0
    conversations = Conversations(backbone.processor)
    while done < turns and time.monotonic() < stop:
        policy = ReusePolicy(minimum="exact", on_miss="prefill")
        session = ChatSession(backbone, ChunkStore.open("memory://"), policy=policy)
        sessions += 1
        history = [{"role": "system", "content": text_of(draw, 1)}, _message(draw), _message(draw)]
        for _ in range(min(25, turns - done)):
            for _ in range(draw.randint(1, 2)):
                _edit(draw, history)
            logits = session.next_token_logits(history)
            wanted = plain_logits(backbone, conversations.whole(history))
            off = float((logits - wanted).norm() / wanted.norm())
            done, wrong, worst = done + 1, wrong + (off > CLOSE), max(worst, off)
            if time.monotonic() > stop:
                break
    return {"turns": done, "sessions": sessions, "divergences": wrong, "worst": worst}


def _message(draw: random.Random) -> dict[str, Any]:
    role = draw.choice(["user", "user", "assistant", "tool"])
    if role == "user" and draw.random() < 0.6:
        items = [{"type": "text", "text": text_of(draw, 1)}, {"type": "image", "image": picture_of(draw, 56)}]
        draw.shuffle(items)
        return {"role": role, "content": items}
    return {"role": role, "content": text_of(draw, draw.randint(1, 4))}


def _edit(draw: random.Random, history: list[dict[str, Any]]) -> None:
    kind = draw.choice(["add", "add", "drop", "replace", "swap", "strip", "system"])
    at = draw.randrange(1, len(history))
    if (kind == "drop" and len(history) > 3) or len(history) > 9:
        del history[at]
    elif kind == "replace":
        history[at] = _message(draw)
    elif kind == "swap" and len(history) > 2:
        other = draw.randrange(1, len(history))
        history[at], history[other] = history[other], history[at]
    elif kind == "strip" and isinstance(history[at]["content"], list):
        history[at] = {**history[at], "content": history[at]["content"][:1]}
    elif kind == "system" and draw.random() < 0.1:
        history[0] = {"role": "system", "content": text_of(draw, 1)}
    else:
        history.insert(at + 1, _message(draw))
