"""Random turns of sessions in the exact mode, each held against an uncached run of its whole prompt."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.content import Conversations
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from lab.replay.scripts import picture_of, spoken, text_of
from lab.replay.styles import STYLES, styled
from lab.testbed import load

CLOSE = 1e-4
"""The largest relative difference of fp32 logits that is no divergence."""

Found = dict[str, Any]


def divergences(
    families: Sequence[str],
    turns: int,
    seed: int,
    seconds: float,
    *,
    layers: int | None = None,
    tell: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Up to ``turns`` turns in at most ``seconds``: how many were run, and how many diverged.

    Sessions go in turn through every family under every template style; ``tell`` hears after each. Which
    edits happen depends on the seed alone. ``layers``: the backbones' first decoder layers only.
    """
    draw = random.Random(seed)
    stop = time.monotonic() + seconds
    kinds = list(product(STYLES, families))
    backbones = {}
    done: Counter[str] = Counter()
    wrong, worst, sessions = 0, 0.0, 0
    found: Found = {}
    while done.total() < turns and time.monotonic() < stop:
        style, family = kinds[sessions % len(kinds)]
        sessions += 1
        if (style, family) not in backbones:
            model, processor = load(family)
            model = model if layers is None else shallow(model, layers)
            processor.chat_template = styled(processor, style)
            backbones[style, family] = HfEngine(model, processor)
        offs = _session(backbones[style, family], draw, min(25, turns - done.total()), stop)
        done[f"{family} {style}"] += len(offs)
        wrong += sum(off > CLOSE for off in offs)
        worst = max([worst, *offs])
        found = {"turns": done.total(), "sessions": sessions, "divergences": wrong, "worst": worst}
        found |= {"by template": dict(sorted(done.items()))}
        tell(found)
    return found


def shallow(model: Any, layers: int) -> Any:
    """The model's first ``layers`` decoder layers, with all the rest of it."""
    config = copy.deepcopy(model.config)
    config.get_text_config().num_hidden_layers = layers
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds is not None:
        config.get_text_config().layer_types = kinds[:layers]
    small = type(model)(config).eval()
    small.load_state_dict(model.state_dict(), strict=False)
    return small


def _session(backbone: HfEngine, draw: random.Random, turns: int, stop: float) -> list[float]:
    """The relative difference of the logits after each turn of one session."""
    conversations = Conversations(backbone.processor)
    policy = ReusePolicy(minimum="exact", on_miss="prefill")
    session = ChatSession(backbone, ChunkStore.open("memory://"), policy=policy)
    history = [{"role": "system", "content": text_of(draw, 1)}, _message(draw), _message(draw)]
    shows = "tool_calls" in getattr(backbone.processor, "chat_template", "")
    offs = []
    for _ in range(turns):
        for _ in range(draw.randint(1, 2)):
            _edit(draw, history)
        shown = history if shows else spoken(policies.keep_all())(history, 0)
        logits = session.next_token_logits(shown)
        wanted = backbone.plain.logits(conversations.whole(shown))
        offs.append(float((logits - wanted).norm() / wanted.norm()))
        if time.monotonic() > stop:
            break
    return offs


def _message(draw: random.Random) -> dict[str, Any]:
    role = draw.choice(["user", "user", "assistant", "tool"])
    if role == "user" and draw.random() < 0.6:
        items = [{"type": "text", "text": text_of(draw, 1)}, {"type": "image", "image": picture_of(draw, 56)}]
        draw.shuffle(items)
        return {"role": role, "content": items}
    said = text_of(draw, draw.randint(1, 4))
    if role == "assistant" and draw.random() < 0.3:
        said = f"<think>\n{text_of(draw, 1)}\n</think>\n\n{said}"
    if role == "assistant" and draw.random() < 0.3:
        call = {"id": "c", "type": "function", "function": {"name": "edit", "arguments": {"line": 1}}}
        return {"role": role, "content": said, "tool_calls": [call]}
    return {"role": role, "content": said}


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
