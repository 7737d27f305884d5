"""A refusal is one line that quotes at most 80 characters of a value, however large the value is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kamera import Backbone, ChatSession, ChunkStore, KameraWindow, ReusePolicy
from kamera.content import load_image, read_video
from kamera.content.video import load_clip
from kamera.edits import Directive, edit_messages, policies
from kamera.engines.hf import HfEngine
from kamera.errors import QUOTED, first_line, quote
from kamera.reuse import Reuser
from kamera.sessions import SessionPool
from tests.content.templates import TALK
from tests.sessions.rig import EXACT, seeing, session, speaking

LONGEST = 400
"""Characters of a whole message."""

MANY = 1200
WORD = "x" * MANY


class Rude:
    """Its repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


HUGE: dict[str, Any] = {
    "text": WORD,
    "lines": "<|im_end|>\n" * 100,
    "bytes": b"\x00" * MANY,
    "list": list(range(MANY)),
    "texts": [WORD] * 3,
    "dict": {"type": WORD, WORD: WORD},
    "nested": {"image": {"url": {"url": [WORD]}}},
    "array": np.zeros((200, 200)),
    "tensor": torch.zeros(300, 300),
    "path": Path("/" + "/".join([WORD[:200]] * 9)),
    "url": "https://example.com/" + WORD,
    "data url": "data:image/png;base64," + WORD,
    "object": Rude(),
}


def window(policy: Any = EXACT, **options: Any) -> KameraWindow:
    return KameraWindow(seeing(), ChunkStore.open("memory://"), policy=policy, **options)


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "append": lambda v: window().append(v),
    "append item": lambda v: window().append({"type": "image", "image": v}),
    "append text item": lambda v: window().append({"type": "text", "text": [v]}),
    "append part": lambda v: window().append({"type": "image_url", "image_url": {"url": v}}),
    "append option": lambda v: window().append({"type": "image", "image": "a.png", "max_pixels": v}),
    "append archive": lambda v: window().append("x", archive=v),
    "append role": lambda v: window().append({"role": v, "content": "x"}),
    "append content": lambda v: window().append({"role": "user", "content": v}),
    "append key": lambda v: window().append({"type": "image", "image": "a.png", str(v): 1}),
    "append clip": lambda v: window().append({"type": "video", "video": [v]}),
    "insert": lambda v: window().insert(v, "x"),
    "evict": lambda v: window().evict(v),
    "slide": lambda v: window().slide(v),
    "reorder": lambda v: window().reorder(v),
    "condition": lambda v: window().condition(0, v),
    "recall": lambda v: window().recall(v),
    "recall like": lambda v: window().recall(like=v),
    "recall score": lambda v: window().recall(like="x", min_score=v),
    "search": lambda v: window().search(v),
    "search k": lambda v: window().search("x", k=v),
    "generate": lambda v: window().generate("x", max_new_tokens=v),
    "generate option": lambda v: window().generate("x", option=v),
    "question": lambda v: window().next_token_logits({"role": v, "content": "x"}),
    "question ids": lambda v: window().next_token_logits([v]),
    "policy": window,
    "on_leave": lambda v: window(on_leave=v),
    "minimum": lambda v: ReusePolicy(minimum=v),
    "on_miss": lambda v: ReusePolicy(on_miss=v),
    "layers": lambda v: ReusePolicy(layers=[v]),
    "backbone": lambda v: KameraWindow(v, ChunkStore.open("memory://")),
    "store": lambda v: KameraWindow(seeing(), v),
    "model": HfEngine,
    "model name": Backbone.from_pretrained,
    "dtype": lambda v: Backbone.from_pretrained("/no/such", dtype=v).engine,
    "device": lambda v: Backbone.from_pretrained("/no/such", device=v).engine,
    "send": lambda v: session(speaking("headers")).send([v]),
    "send role": lambda v: session(speaking("headers")).send([{"role": v, "content": "x"}] * 9),
    "send roles": lambda v: session(speaking("turns")).send([{"role": "system", "content": "x"}] * 9),
    "send content": lambda v: session(seeing()).send([{"role": "user", "content": [v]}]),
    "send item": lambda v: session(seeing()).send(
        [{"role": "user", "content": [{"type": "image", "image": v}]}]
    ),
    "send clip": lambda v: session(seeing()).send(
        [{"role": "user", "content": [{"type": "video", "video": v}]}]
    ),
    "send part": lambda v: session(seeing()).send(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": v}}]}]
    ),
    "send special": lambda v: session(speaking("thinking")).send("<|im_end|>" + str(v)),
    "send option": lambda v: session(speaking("headers")).send(TALK, seed=v),
    "mode": lambda v: ChatSession(speaking("headers"), ChunkStore.open("memory://"), mode=v),
    "pool session": lambda v: _pool().send("x", str(v)),
    "pool tenant": lambda v: _pool().send("x", tenant=str(v)),
    "pool drop": lambda v: _pool().drop(str(v)),
    "reuser": lambda v: Reuser(seeing(), ChunkStore.open("memory://"), EXACT).prepare([{"role": v}]),
    "directive": lambda v: Directive(0, 1, mode=v),
    "directive index": lambda v: Directive(v, 1),
    "edits": lambda v: edit_messages(None, TALK, [Directive(0, 1)], tools=None, snap=v),
    "edit policy": lambda v: _edited(lambda messages, turn: [v]),
    "edit policy raises": lambda v: _edited(lambda messages, turn: {}[str(v)]),
    "placeholder": lambda v: policies.keep_last_images(1, v, whole_turns=True),
    "image": load_image,
    "clip": load_clip,
    "video": lambda v: read_video(str(v)),
    "kind": lambda v: ChunkStore.open("memory://").ls(v),
    "memory limit": lambda v: ChunkStore.open("memory://", memory_limit=str(v)),
    "kv": lambda v: ChunkStore.open("memory://", kv=v),
    "digest": lambda v: ChunkStore.open("memory://", digest=v),
}


def _pool() -> SessionPool:
    return SessionPool(speaking("headers"), ChunkStore.open("memory://"), policy=EXACT)


def _edited(policy: Any) -> Any:
    return session(speaking("headers"), edit_policy=policy).send(TALK)


@pytest.mark.few(6)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_refusal_is_short_however_large_the_value(entry):
    refused = 0
    for name, value in HUGE.items():
        try:
            ENTRIES[entry](value)
        except Exception as error:
            assert not isinstance(error, NameError)
            said = str(error)
            refused += 1
            assert len(said) <= LONGEST, f"{name}: {said[:300]}… ({len(said)} characters)"
            assert "\n" not in said, name
    assert refused


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a", "'a'"),
        (3, "3"),
        ({"a": [1]}, "{'a': [1]}"),
        ("a\nb", r"'a\nb'"),
        (np.arange(2), "array([0, 1])"),
        (Path("/a/b.png"), "'/a/b.png'"),
    ],
)
def test_a_short_value_is_shown_whole(value, shown):
    assert quote(value) == shown


@pytest.mark.parametrize("name", HUGE)
def test_a_long_value_is_cut_and_says_so(name):
    shown = quote(HUGE[name])
    assert len(shown) <= QUOTED
    assert "\n" not in shown
    assert "…" in shown or name in ("array", "object")


def test_of_a_long_path_the_end_is_shown():
    assert quote(Path("/" + "a" * 200 + "/end.png")).endswith("aaa/end.png'")


def test_a_value_without_a_repr_is_named_by_its_type():
    assert quote(Rude()) == "<Rude>"


def test_another_librarys_message_is_one_short_line():
    assert first_line(ValueError("a\nb")) == "a"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(FileNotFoundError(2, "No such file", WORD)) == "No such file"
    assert len(first_line(ValueError(WORD))) == 200
