"""Random edits of both signs, and trajectories of many turns with several edits each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from kamera import ChatSession, ChunkStore, testbed
from kamera.content import Rendered
from kamera.edits import Directive, edit_messages
from kamera.engines.hf import HfEngine
from kamera.errors import InvalidDirective
from kamera.testbed.frames import Frame
from lab.leyline.judged import Judge
from lab.leyline.prompts import HELD_OUT, Desk, Messages, asked, conversation, of_one_size, span_of

MODES = ("amortize", "repair", "forget")
_WORDS = ("note", "row", "side", "half", "step", "turn", "list", "mark")
LAYOUT = "LLPLIPL"
TOKENS = (8, 200)
"""Lengths of the spans and replacements of random edits."""


def random_edits(backbone: HfEngine, name: str, trials: int, seed: int) -> dict[str, Any]:
    """One or two edits at random tokens of a prompt of frames, widened to whole pictures and tags.

    In half of the trials the replacement is longer than the span. Each trial asks one question, at random,
    of the frames before the edit.
    """
    desk, draw = Desk(backbone), random.Random(seed)
    world = testbed.World(HELD_OUT + 1 + seed)
    judges = {(mode, sign): Judge() for mode in MODES for sign in ("shorter", "longer")}
    refused = done = index = 0
    while done < trials:
        episode = world.episode(index, layout=LAYOUT)
        index += 1
        whole = conversation(of_one_size(name, episode.frames))
        rendered = desk.conversations.render(whole)
        sign = ("shorter", "longer")[done % 2]
        directives = [_random(draw, rendered, sign) for _ in range(draw.randint(1, 2))]
        try:
            edited = edit_messages(desk.conversations, whole, directives, snap="widen")
        except InvalidDirective:
            refused += 1
            continue
        done += 1
        question = draw.choice(episode.questions).text
        full, prompt = desk.plain(asked(whole, question)), asked(edited, question)
        new = desk.plain(prompt)
        for mode in MODES:
            chat = desk.session(mode, ChunkStore.open("memory://"))  # type: ignore[arg-type]
            chat.next_token_logits(whole)
            chat.next_token_logits(edited)
            judges[mode, sign].see(chat.next_token_logits(prompt), full, new)
    return {
        "refused": refused,
        "arms": {f"{mode}, {sign}": judge.summary() for (mode, sign), judge in judges.items()},
    }


def _random(draw: random.Random, rendered: Rendered, sign: str) -> Directive:
    """A directive in tokens, somewhere behind the system prompt."""
    first = rendered.segments[1].stop
    size = draw.randint(*TOKENS)
    start = draw.randrange(first, max(first + 1, rendered.stable - size))
    words = draw.randint(size + 1, 2 * size) if sign == "longer" else draw.randint(0, size // 4)
    text = "".join(f"{draw.choice(_WORDS)} " for _ in range(words)) + "\n"
    return Directive(start, min(start + size, rendered.stable), text if words else None)


def trajectory(backbone: HfEngine, name: str, steps: int, most: int, seed: int) -> dict[str, Any]:
    """A session of ``steps`` frames whose history is edited up to ``most`` times a turn.

    Every turn a frame comes and a question follows. Once more than ``most`` + 2 frames are there, 1 to
    ``most`` old ones, at random, leave or become stubs. The full context is a session that keeps every frame.
    """
    desk, draw = Desk(backbone), random.Random(seed)
    frames = of_one_size(name, _stream(steps, seed))
    stores = {mode: ChunkStore.open("memory://") for mode in (*MODES, "full")}
    chats = {mode: desk.session(mode, stores[mode]) for mode in MODES}  # type: ignore[arg-type]
    keeper = desk.session("amortize", stores["full"])
    judges = {mode: Judge() for mode in MODES}
    messages: Messages = conversation([])
    everything: Messages = conversation([])
    edits = turns = largest = 0
    for frame in frames:
        messages, everything = _shown(messages, frame), _shown(everything, frame)
        for chat in chats.values():  # a frame is seen before it can leave
            chat.next_token_logits(messages)
        directives = _old(draw, desk.conversations.render(messages), most)
        edits += len(directives)
        turns += bool(directives)
        largest = max(largest, len(directives))
        messages = edit_messages(desk.conversations, messages, directives) if directives else messages
        question = _question(draw, [f for f in frames if _in(f, messages)])
        if question is None:
            continue
        prompt = asked(messages, question)
        new = desk.plain(prompt)
        full = keeper.fork().next_token_logits(asked(everything, question)).float()
        for mode, chat in chats.items():
            judges[mode].see(_moved(chat, messages, prompt), full, new)
    return {
        "steps": steps,
        "edits": edits,
        "turns with edits": turns,
        "most edits of a turn": largest,
        "arms": {mode: judge.summary() for mode, judge in judges.items()},
    }


def _moved(chat: ChatSession, messages: Messages, prompt: Messages) -> torch.Tensor:
    chat.next_token_logits(messages)
    return chat.fork().next_token_logits(prompt)


def _shown(messages: Messages, frame: Frame) -> Messages:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": [*last["content"], *frame.content]}]


def _in(frame: Frame, messages: Messages) -> bool:
    held = [item["image"] for item in messages[-1]["content"] if "image" in item]
    return any(image is frame.image for image in held)


def _stream(steps: int, seed: int) -> list[Frame]:
    """Frames of several episodes: legends, pictures, and now and then items."""
    world = testbed.World(HELD_OUT + 2 + seed)
    out: list[Frame] = []
    while len(out) < steps:
        out += world.episode(len(out), layout="LLIPLLIPL").frames
    return out[:steps]


def _old(draw: random.Random, rendered: Rendered, most: int) -> list[Directive]:
    """Frames that leave or become stubs: none while ``most`` + 2 or fewer are there."""
    count = sum(s.media is not None for s in rendered.segments)
    if count <= most + 2:
        return []
    leaving = draw.sample(range(count - 1), draw.randint(1, most))
    stubs = [None, "[one frame removed]\n"]
    return [
        Directive(*span_of(rendered, frame), draw.choice(stubs), unit="segments") for frame in sorted(leaving)
    ]


def _question(draw: random.Random, frames: Sequence[Frame]) -> str | None:
    episode = testbed.world.Episode(tuple(frames), 0)
    subjects = episode.subjects(["value"]) or episode.subjects(["colour"])
    return episode.ask(*draw.choice(subjects)).text if subjects else None
