"""``python -m lab.price chats``: forwards and tokens of short conversations, counted by hooks on the model.

Conversations of the shipped backbone run under a policy as users run them. Counted are, by hooks of this
script over all threads, what ran before the first token of each answer, and all that ran once later work is
done. Beside them stand the plain model with a kept cache (each token of the conversation once) and a prefix
cache (per turn the tokens behind the longest common prefix with the turn before). Counts are no times: they
are the same on every machine.

    python -m lab.price chats [--turns 10] [--format json] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kamera import ChatSession, ChunkStore, ReusePolicy, testbed
from kamera.content import common_prefix
from kamera.edits import EditPolicy, policies
from kamera.engines.hf import HfEngine
from lab.price.counting import watching
from lab.results import keep
from lab.speed.machine import commit, machine

ANSWER = 4
POLICIES = {"exact": ReusePolicy.exact(), "default": ReusePolicy(certified=True)}
OPTIONS: dict[str, Any] = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}


@dataclass(frozen=True)
class Row:
    """One conversation under one policy; each pair is forwards and tokens.

    ``first`` ran before the first tokens of all answers, ``whole`` with answers and later work; ``reported``
    is the session's own account of it. ``plain`` is that of a kept cache, with answers, ``prefix`` that of a
    prefix cache, before the first token.
    """

    conversation: str
    policy: str
    turns: int
    first: tuple[int, int]
    whole: tuple[int, int]
    reported: tuple[int, int]
    plain: tuple[int, int]
    prefix: tuple[int, int]


def conversation(
    name: str, backbone: HfEngine, messages: list[dict[str, Any]], edit: EditPolicy | None, policy: str
) -> Row:
    """Run a conversation, message by message."""
    session = ChatSession(
        backbone, ChunkStore.open("memory://"), policy=POLICIES[policy], edit_policy=edit, mode=_mode(policy)
    )
    before: list[int] = []
    first, prefix, plain = [0, 0], [0, 0], [0, 0]
    with watching(backbone) as whole:
        for message in messages:
            start = len(whole.spans)
            session.send(message, **OPTIONS)
            asked = whole.mine(start)[: 1 - ANSWER]  # later work may run beside the answer
            session.flush()
            prompt = session.prompt_ids.tolist()
            new = len(prompt) - common_prefix(before, prompt)
            for into, forwards, tokens in ((first, len(asked), sum(asked)), (prefix, 1, new)):
                into[0] += forwards
                into[1] += tokens
            plain[0] += ANSWER
            plain[1] += new + ANSWER - 1
            before = prompt
    usage = session.usage()
    reported = (usage.now.forwards + usage.later.forwards, usage.now.tokens + usage.later.tokens)
    counts = (tuple(first), whole.counts, reported, tuple(plain), tuple(prefix))
    return Row(name, policy, len(messages), *counts)  # type: ignore[arg-type]


def _mode(policy: str) -> Any:
    return "forget" if policy == "exact" else "auto"


def conversations(turns: int) -> dict[str, tuple[list[dict[str, Any]], EditPolicy | None]]:
    """Messages and edit policy by name."""
    world = testbed.World(seed=0)
    frames = [f.image for e in range(4) for f in world.episode(e, legends=6).frames][:turns]
    shown = [
        {"role": "user", "content": [{"type": "image", "image": f}, {"type": "text", "text": "tag 3?"}]}
        for f in frames
    ]
    told = [{"role": "user", "content": f"value of tag {n}?"} for n in range(turns)]
    kept: dict[str, Callable[[], EditPolicy]] = {
        f"last {n} pictures": (lambda n=n: policies.keep_last_images(n)) for n in (1, 3, 5, 8)
    }
    return {
        "pictures, appended": (shown, None),
        "text, appended": (told, None),
        **{name: (shown, make()) for name, make in kept.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m lab.price chats", description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backbone = HfEngine(*testbed.load())
    rows = [
        conversation(name, backbone, messages, edit, policy)
        for name, (messages, edit) in conversations(options.turns).items()
        for policy in POLICIES
    ]
    document = {
        "commit": commit(),
        "machine": machine(),
        "turns": options.turns,
        "rows": [*map(asdict, rows)],
    }
    if options.output:
        keep(document, Path(options.output))
    if options.format == "json":
        print(json.dumps(document, indent=1))
        return
    print("| conversation | policy | before the first token | prefix cache | whole | plain | account |")
    for row in rows:
        cells = (row.first, row.prefix, row.whole, row.plain, row.reported)
        print("|", " | ".join([row.conversation, row.policy, *(f"{a} / {b:,}" for a, b in cells)]), "|")
