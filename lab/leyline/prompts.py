"""Prompts whose answer an edit changes, the four kinds of stub, and sessions over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kamera import ChatSession, ChunkStore, ReusePolicy, testbed
from kamera.content import Conversations, Rendered
from kamera.engines.hf import HfEngine
from kamera.sessions.modes import SessionMode
from kamera.testbed.frames import BLANK, Frame
from lab.testbed.directories import UNLED_BACKBONES

HELD_OUT = 960_000
"""Seed of the worlds; backbones were trained from 1 000 000."""

LAYOUTS = dict.fromkeys(UNLED_BACKBONES, ("LLI", "LPLI", "LLLI"))
RENAMES = ("LLI", "LRI", "LLRI", "LPLI")
"""Layouts of a backbone: the unled ones were shown no renames."""

_CELLS = 12
"""Cells of an items frame, each way."""

Stub = Literal["faithful", "pad", "scrambled", "empty"]
STUBS: tuple[Stub, ...] = ("faithful", "pad", "scrambled", "empty")
_MARKER = "[one frame removed]\n"
_WORDS = ("note", "row", "side", "half", "step", "turn", "list", "mark", "line", "part")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Item:
    """A prompt of frames, the frame that the edit replaces, and questions whose answer that changes."""

    frames: tuple[Frame, ...]
    gone: int
    questions: tuple[str, ...]


def of_one_size(name: str, frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames; those of mha blank to the size of an items frame.

    Its processor pads the pictures of one prompt to the largest, so only pictures of one size have tokens of
    their own (other prompts are refused by name).
    """
    return tuple(map(_padded, frames)) if name == "mha" else tuple(frames)


def _padded(frame: Frame) -> Frame:
    rows = [(*row, *(BLANK,) * (_CELLS - len(row))) for row in frame.cells]
    return replace(frame, cells=(*rows, *((BLANK,) * _CELLS,) * (_CELLS - len(rows))))


def items(name: str, seed: int, most: int) -> Iterator[Item]:
    """Without end: windows of which a frame before the items leaves, with at most ``most`` questions each."""
    layouts = LAYOUTS.get(name, RENAMES)
    world = testbed.World(HELD_OUT + seed)
    draw = random.Random(seed)
    index = 0
    while True:
        episode = world.episode(index, layout=layouts[index % len(layouts)])
        index += 1
        speaking = [i for i, f in enumerate(episode.frames) if f.kind in ("legend", "rename")]
        gone = draw.choice(speaking)
        rest = [i for i in range(len(episode.frames)) if i != gone]
        asked = [episode.ask(*subject) for subject in episode.subjects(["value"])]
        changed = [q.text for q in asked if episode.answer(q, rest) not in (None, q.answer)]
        draw.shuffle(changed)
        if changed:
            yield Item(of_one_size(name, episode.frames), gone, tuple(changed[:most]))


def conversation(frames: Sequence[Frame], question: str = "") -> Messages:
    """Frames in one user message, and the question behind them."""
    content = [item for frame in frames for item in frame.content]
    if question:
        content.append({"type": "text", "text": question})
    return [{"role": "system", "content": testbed.SYSTEM}, {"role": "user", "content": content}]


def asked(messages: Messages, question: str) -> Messages:
    """The conversation with a question at the end of its last message."""
    last = messages[-1]
    return [
        *messages[:-1],
        {**last, "content": [*last["content"], {"type": "text", "text": question}]},
    ]


def span_of(rendered: Rendered, frame: int) -> tuple[int, int]:
    """Segments of the ``frame``-th picture and its caption."""
    pictures = [i for i, s in enumerate(rendered.segments) if s.media is not None]
    return pictures[frame], pictures[frame] + 2


def stub_text(kind: Stub, tokens: int, tokenize: Callable[[str], Sequence[int]], seed: int) -> str | None:
    """A stub for a span of ``tokens`` tokens; pad and scrambled are as long as it."""
    if kind == "empty":
        return None
    if kind == "faithful":
        return _MARKER
    draw = random.Random(seed)
    text = ""
    while len(tokenize(text)) < tokens:
        text += "\n" if kind == "pad" else f" {draw.choice(_WORDS)}"
    return text


class Desk:
    """Sessions of one backbone, and the plain model beside them."""

    def __init__(self, backbone: HfEngine) -> None:
        self.backbone = backbone
        self.conversations = Conversations(backbone.processor)

    def session(self, mode: SessionMode, store: ChunkStore) -> ChatSession:
        """A session that serves patches and survivors without asking for a certificate."""
        policy = ReusePolicy(
            on_miss="form" if mode == "repair" else "prefill", certified=False, forms="always"
        )
        return ChatSession(self.backbone, store, mode=mode, policy=policy)

    def formed(self, store: ChunkStore, *prompts: Messages) -> None:
        """Store what a repairing session forms of these prompts, one after the other."""
        first = self.session("repair", store)
        for messages in prompts:
            first.next_token_logits(messages)

    def plain(self, messages: Messages) -> torch.Tensor:
        """Logits ``[vocabulary]`` behind the whole prompt, nothing cached."""
        return self.backbone.plain.logits(self.conversations.whole(messages)).float()
