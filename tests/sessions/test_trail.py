"""Histories that a client edits as it likes, and takes back: no turn runs more than a prefix cache would."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.price.counting import named, shared, watching
from kamera import ChunkStore, ReusePolicy, SessionPool, testbed
from kamera.content import Conversations, common_prefix
from kamera.engines.hf import HfEngine
from kamera.sessions import ChatSession
from tests.sessions.rig import speaking

OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
SYSTEMS = ("You watch a camera.", "You watch two cameras.", "You watch a camera. It is 3 o'clock.")
PICTURE = 5
"""The id of a picture's tokens."""

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    worlds = (testbed.World(seed=seed).episode(0, legends=4) for seed in range(3))
    return [frame.image for world in worlds for frame in world.frames]


class Client:
    """A client that edits its history at random, and sometimes takes an edit back."""

    def __init__(self, seed: int, frames: list) -> None:
        self._draw, self._frames = random.Random(seed), frames
        self.sent: list[Messages] = []
        self.history: Messages = [{"role": "system", "content": SYSTEMS[0]}, self._user(shows=True)]

    def next(self, answer: str) -> str:
        """The next history, after an answer to this one, and what was done."""
        self.sent.append(list(self.history))
        self.history = [*self.history, {"role": "assistant", "content": answer}]
        edits = [self.append] * 3 + [self.show, self.hide, self.swap, self.drop, self.retell, self.reword]
        edit = self._draw.choice([*edits, self.undo, self.undo, self.again, self.back, self.cut, self.system])
        edit()
        if self.history[-1]["role"] != "user":
            self.history.append(self._user(shows=self._draw.random() < 0.3))
        return edit.__name__

    def append(self) -> None:
        """No edit."""

    def show(self) -> None:
        """A picture in front of an older message."""
        self._change(lambda m: {**m, "content": [self._picture(), *_texts(m)]})

    def hide(self) -> None:
        self._change(lambda m: {**m, "content": _texts(m)})

    def swap(self) -> None:
        self._change(lambda m: {**m, "content": [self._picture(), *_texts(m)]} if _shows(m) else m)

    def drop(self) -> None:
        at = self._draw.randrange(1, len(self.history))
        del self.history[at : at + self._draw.choice([1, 2])]

    def retell(self) -> None:
        self._change(lambda m: {**m, "content": f"{m['content']} ok"}, role="assistant")

    def reword(self) -> None:
        self._change(lambda m: m if _shows(m) else {**m, "content": f"now {m['content']}"})

    def undo(self) -> None:
        self.history = list(self.sent[-2] if len(self.sent) > 1 else self.sent[-1])

    def again(self) -> None:
        self.history = list(self.sent[-1])

    def back(self) -> None:
        self.history = [*self._draw.choice(self.sent)[:-1], self._user()]

    def cut(self) -> None:
        self.history = self.history[: self._draw.randrange(1, len(self.history) + 1)]

    def system(self) -> None:
        self.history[0] = {"role": "system", "content": self._draw.choice(SYSTEMS)}

    def _change(self, change: Any, role: str = "user") -> None:
        places = [i for i, m in enumerate(self.history) if m["role"] == role]
        if places:
            at = self._draw.choice(places)
            self.history[at] = change(self.history[at])

    def _user(self, shows: bool = False) -> dict[str, Any]:
        tag = self._draw.randrange(40)
        text = self._draw.choice([f"value of tag {tag}?", f"and tag {tag} now, please?", "what is there"])
        return {
            "role": "user",
            "content": [self._picture(), {"type": "text", "text": text}] if shows else text,
        }

    def _picture(self) -> dict[str, Any]:
        return {"type": "image", "image": self._draw.choice(self._frames)}


def _texts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [item for item in items if item["type"] == "text"]


def _shows(message: dict[str, Any]) -> bool:
    return len(_texts(message)) < len(message["content"]) and not isinstance(message["content"], str)


class Until:
    """A logits processor that notes how many forwards had run before the first token."""

    def __init__(self, spans: list[int]) -> None:
        self._spans, self.stop = spans, None

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.stop = len(self._spans) if self.stop is None else self.stop
        return scores


def walked(backbone: HfEngine, frames: list, seed: int, turns: int, policy: ReusePolicy, name: str | None):
    """Each turn's edit, the tokens that it ran before its answer, those of a prefix cache, history and turn.

    The cache forgets nothing and knows each token, those of pictures by their pixels.
    """
    conversations, client, cached = Conversations(backbone.processor), Client(seed, frames), []
    pool, edit = SessionPool(backbone, ChunkStore.open("memory://"), policy=policy), "first"
    for _ in range(turns):
        prompt = named(conversations.render(client.history), PICTURE)
        theirs = len(prompt) - max((shared(each, prompt) for each in cached), default=0)
        with watching(backbone) as ran:
            until = Until(ran.spans)
            turn = pool.send(client.history, name, logits_processor=[until], **OPTIONS)
            mine = sum(ran.mine(0, until.stop))
        pool.flush()
        yield edit, mine, theirs, client.history, turn
        cached.append([*prompt, *turn.token_ids[:-1]])
        edit = client.next(turn.text)


SLACK = 8
"""Tokens more than those of a token's cache: headers of a turn, of a picture, of a system prompt."""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["one", None], ids=["by id", "by content"])
@pytest.mark.parametrize("policy", [ReusePolicy.exact(), ReusePolicy()], ids=["exact", "default"])
@pytest.mark.parametrize(
    ("seeds", "turns"), [(range(2), 10), pytest.param(range(2, 14), 15, marks=pytest.mark.slow)]
)
def test_no_edited_turn_runs_more_than_a_prefix_cache(backbone, frames, seeds, turns, policy, name):
    dearer = []
    for seed in seeds:
        for edit, mine, theirs, _, _ in walked(backbone, frames, seed, turns, policy, name):
            if mine > theirs + SLACK:
                dearer.append((seed, edit, mine, theirs))
    assert dearer == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["one", None], ids=["by id", "by content"])
def test_an_edited_turn_answers_as_a_session_that_saw_its_history_alone(backbone, frames, name):
    for *_, history, turn in walked(backbone, frames, 1, 12, ReusePolicy.exact(), name):
        alone = ChatSession(backbone, ChunkStore.open("memory://"), policy=ReusePolicy.exact())
        assert alone.send(history, **OPTIONS).token_ids == turn.token_ids


def test_what_a_window_said_counts_only_behind_the_very_prompt_that_it_answered():
    chat = ChatSession(speaking("headers"), ChunkStore.open("memory://"), policy=ReusePolicy.exact())
    first = [{"role": "user", "content": "the lamp is on and the door is not " * 4}]
    turn = chat.send(first, **OPTIONS)
    for word, equal in (("lamp", True), ("door", False)):
        begun = [{"role": "user", "content": first[0]["content"].replace("lamp", word, 1)}]
        goes_on = [*begun, {"role": "assistant", "content": turn.text}, {"role": "user", "content": "and?"}]
        prompt = Conversations(chat.backbone.processor).render(goes_on)
        same = common_prefix(chat.prompt_ids.tolist(), prompt.ids.tolist())
        shares = chat.state.shares(prompt)
        assert (shares >= len(chat.prompt_ids)) is equal and (equal or shares <= same)
