"""Clients that edit their histories, or ask again, on the shipped backbone: answers, and tokens of each turn.

A pool with the server's defaults answers; plain transformers answers the same messages from nothing, in fp32.
The prefix cache beside it knows pictures, token by token, and has all that the conversation sent and got.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from benchmarks import report
from benchmarks.price.counting import Ran, named, shared, watching
from kamera import ChunkStore, ReusePolicy, SessionPool, testbed
from kamera.content import Conversations, own_messages
from kamera.engines.hf import HfEngine

Messages = list[dict[str, Any]]
Edit = Callable[[Messages, random.Random, Sequence[Any]], Messages]
"""What a client makes of its history before it asks again: of pictures it draws some."""

ANSWER, OPENING = 4, 4
"""Tokens of an answer; turns before the first edit."""

THOUGHT = "<think>The desk has a lamp and a tag.</think>\n\n"


# -- what a client does to its history -------------------------------------------------------------


def _items(message: dict[str, Any]) -> list[Any]:
    content = message["content"]
    return [_text(content)] if isinstance(content, str) else list(content)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(picture: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def _with(messages: Messages, at: int, content: Any) -> Messages:
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


def _at(messages: Messages, draw: random.Random, role: str = "user", *, seen: bool = False) -> int:
    """Any message of a role; one with a picture if that is asked for and there is one."""
    found = [i for i, m in enumerate(messages) if m["role"] == role]
    return draw.choice([i for i in found if seen and not isinstance(messages[i]["content"], str)] or found)


def _deleted(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    asked = [i for i, m in enumerate(messages[:-2]) if m["role"] == "user"]
    gone = {j for i in draw.sample(asked, min(2, len(asked))) for j in (i, i + 1)}
    return [m for i, m in enumerate(messages) if i not in gone]


def _changed(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    at = _at(messages, draw, seen=True)
    return _with(messages, at, [_image(draw.choice(pictures)), *_items(messages[at])[1:]])


def _removed(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    at = _at(messages, draw, seen=True)
    return _with(messages, at, [item for item in _items(messages[at]) if item["type"] == "text"])


def _moved(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    at = _at(messages, draw, seen=True)
    texts = [item for item in _items(messages[at]) if item["type"] == "text"]
    moved = [item for item in _items(messages[at]) if item["type"] != "text"]
    return [*_with(messages, at, texts), {"role": "user", "content": [*moved, _text("this one?")]}]


def _added(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    at = _at(messages, draw, seen=True)
    return _with(messages, at, [*_items(messages[at]), _image(draw.choice(pictures))])


def _stripped(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    spoken = [m["content"] if m["role"] == "assistant" else "" for m in messages]
    return [
        {**m, "content": text.rpartition("</think>\n\n")[2]} if text else m
        for m, text in zip(messages, spoken, strict=True)
    ]


def _reworded(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    at = _at(messages, draw)
    kept = [item for item in _items(messages[at]) if item["type"] != "text"]
    return _with(messages, at, [*kept, _text(f"What is the value of tag {draw.randrange(40)}, please?")])


def _clock(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    return _with(messages, 0, f"{testbed.SYSTEM} It is {draw.randrange(24)}:{draw.randrange(10, 60)}.")


def _trimmed(messages: Messages, draw: random.Random, pictures: Sequence[Any]) -> Messages:
    at = _at(messages, draw, "assistant")
    return _with(messages, at, messages[at]["content"][: draw.randrange(1, 9)].strip() or ".")


UNDO, AGAIN = "an undo", "asked again"
"""The history is again what it was before the edit of the turn before; the turn before is asked once more."""

KINDS: dict[str, Edit] = {
    "two deletions at once": _deleted,
    "a picture changed": _changed,
    "a picture removed": _removed,
    "a picture moved to the tail": _moved,
    "a second picture added": _added,
    "reasoning stripped": _stripped,
    "a message reworded": _reworded,
    "a clock in the system prompt": _clock,
    "an assistant turn trimmed": _trimmed,
}


# -- conversations ---------------------------------------------------------------------------------


class First:
    """A logits processor that notes what had run before the first token."""

    def __init__(self, ran: Ran) -> None:
        self._ran, self.tokens = ran, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are."""
        self.tokens = self.tokens or sum(self._ran.mine(0))
        return scores


def talk(backbone: HfEngine, pictures: Sequence[Any], seed: int) -> Iterator[report.Row]:
    """A row for each turn of a conversation, all kinds of edits in any order; an even ``seed`` has an id."""
    draw, cached = random.Random(seed), list[list[Hashable]]()
    pool = SessionPool(backbone, ChunkStore.open("memory://"), policy=ReusePolicy.exact())
    name, conversations = None if seed % 2 else "client", Conversations(backbone.processor)
    options: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": False}
    messages: Messages = [{"role": "system", "content": testbed.SYSTEM}]
    before = messages
    sent = before
    for kind in ["none"] * OPENING + draw.sample([*KINDS, UNDO, AGAIN], len(KINDS) + 2):
        edited = {UNDO: before, AGAIN: sent}.get(kind, messages)
        before, messages = messages, KINDS[kind](messages, draw, pictures) if kind in KINDS else edited
        if messages[-1]["role"] != "user":
            asked = f"value of tag {draw.randrange(40)}?"
            content = [_image(draw.choice(pictures)), _text(asked)] if draw.random() < 0.6 else asked
            messages = [*messages, {"role": "user", "content": content}]
        sent, owned = messages, own_messages(messages)
        prompt = conversations.render(owned)
        tokens = named(prompt, backbone.model.config.image_token_id)
        theirs = len(tokens) - max((shared(one, tokens) for one in cached), default=0)
        with watching(backbone) as ran:
            first = First(ran)
            turn = pool.send(messages, name, logits_processor=[first], **options)
            pool.flush()
        plain = backbone.plain.generate(conversations.whole(owned), **options)[0].tolist()
        cached.append([*tokens, *turn.token_ids[:-1]])
        yield {
            "edit": kind,
            "id": "no" if name is None else "yes",
            "turns": 1,
            "prompts": len(tokens),
            "first, tokens": first.tokens,
            "prefix cache": theirs,
            "turns dearer": int(first.tokens > theirs),
            "answers that differ": int(list(turn.token_ids) != plain),
        }
        thought = THOUGHT if kind == "none" else ""  # what its client makes of the answer
        messages = [*messages, {"role": "assistant", "content": thought + turn.text}]


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each kind of edit, with the session's id and without, of as many turns as asked for."""
    backbone, found = HfEngine(*testbed.load()), dict[tuple[str, str], dict[str, Any]]()
    pictures = [f.image for e in range(3) for f in testbed.World(seed=3).episode(e, legends=4).frames]
    for seed in range(-(-options.requests // (OPENING + len(KINDS) + 2))):
        for row in talk(backbone, pictures, seed):
            sums = found.setdefault((row["edit"], row["id"]), {})
            sums |= {name: sums.get(name, type(value)()) + value for name, value in row.items()}
            sums |= {"edit": row["edit"], "id": row["id"]}
        report.progress(f"{seed + 1} conversations")
    yield from (
        found[key]
        for key in sorted(found, key=lambda key: (key[1], [*KINDS, UNDO, AGAIN, "none"].index(key[0])))
    )
