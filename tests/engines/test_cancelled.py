"""A call that nobody wants ends between two layers, and leaves windows, sessions and stores as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import WorkCancelled, cancel_when
from kamera.engines.hf import HfEngine
from kamera.patches import later_of
from tests.models import families
from tests.models.families import picture, said
from tests.models.hooks import hooked
from tests.sessions.rig import session
from tests.window.rig import Snapshot

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


class Layers:
    """Counts the layers that run, of the decoder and of the vision tower; ``last`` is the one that may."""

    def __init__(self) -> None:
        self.runs, self.last, self.after = 0, 10**9, 0

    @property
    def is_over(self) -> bool:
        return self.runs >= self.last

    def note(self, *_: Any) -> None:
        self.after += self.is_over
        self.runs += 1


@contextmanager
def counted(engine: HfEngine) -> Iterator[Layers]:
    """Observers behind the layers' own hooks: they hear of layers that run."""
    layers, towers = Layers(), engine.towers
    lists = [p for tower in towers for p in tower.modules() if isinstance(p, torch.nn.ModuleList)]
    parts = (engine.decoder.layers, *lists)
    hooks = [(layer.register_forward_hook, layers.note) for part in parts for layer in part]
    with hooked(engine, *hooks):
        yield layers


class Rig:
    """A window and a session on a store, in a state that a call is to leave."""

    def __init__(self, engine: HfEngine) -> None:
        self.engine, self.store = engine, ChunkStore.open("memory://")
        self.window = KameraWindow(engine, self.store, "S", policy=ReusePolicy())
        self.window.append([picture(), "seen"])
        self.window.append("more text")
        self.chat = session(engine)
        self.chat.send([said("user", picture(), "what?")], max_new_tokens=2, do_sample=False)
        self.plain = session(engine, uncached=True)
        later_of(engine).flush()

    def state(self) -> tuple[Any, ...]:
        later_of(self.engine).flush()
        # an encoding that was whole is kept
        stored = sorted(str(info.key) for info in self.store.ls() if info.kind != "encoding")
        return (
            self.window.slots,
            self.chat.messages,
            self.chat.prompt_ids.tolist(),
            self.plain.messages,
            stored,
        )


SPELT = [said("user", picture(64, 64, 1), "<|im_end|> look")]
CALLS: dict[str, Callable[[Rig], Any]] = {
    "append": lambda r: r.window.append([picture(64, 32, 7), "new"]),
    "generate": lambda r: r.window.generate("what is it?", **GREEDY),
    "beams": lambda r: r.window.generate("what is it?", num_beams=2, **GREEDY),
    "drafts": lambda r: r.window.generate("what is it?", prompt_lookup_num_tokens=3, **GREEDY),
    "logits": lambda r: r.window.next_token_logits("what is it?"),
    "reorder": lambda r: r.window.reorder([1, 0]),
    "send": lambda r: r.chat.send([*r.chat.messages, said("user", picture(32, 64, 8), "and?")], **GREEDY),
    "uncached": lambda r: r.plain.send(SPELT, **GREEDY),
}


@pytest.fixture(scope="module")
def engine():
    return families.engine("qwen2_5_vl")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_not_wanted_ends_at_the_next_layer_and_changes_nothing(engine, call):
    rig = Rig(engine)
    window, chat = rig.window.fork(), rig.chat.fork()
    other = Rig(engine)
    with counted(engine) as layers:
        CALLS[call](other)
        whole = layers.runs
    snapshot, before = Snapshot.of(rig.window), rig.state()
    for last in sorted({1, 2, whole // 4, whole // 2}):
        with counted(engine) as layers, cancel_when(lambda of=layers: of.is_over):
            layers.last = max(1, last)
            with pytest.raises(WorkCancelled):
                CALLS[call](rig)
        assert layers.after == 0
        assert rig.state() == before
        assert snapshot.matches(rig.window)
    want, got = Rig(engine), rig
    for one in (want, got):
        one.window.append("text behind it")
    asked = "so?"
    assert torch.equal(got.window.next_token_logits(asked), want.window.next_token_logits(asked))
    answers = [one.chat.send(asked, **GREEDY).token_ids for one in (want, got)]
    assert answers[0] == answers[1]
    assert window.slots == rig.window.slots[: len(window.slots)] and chat.messages == before[1]


def test_a_wanted_call_and_later_work_go_on(engine):
    rig = Rig(engine)
    with cancel_when(lambda: False):
        assert CALLS["send"](rig).token_ids
    gone = False
    with cancel_when(lambda: gone):
        rig.window.append([picture(64, 64, 9), "kept"])
        gone = True
        rig.window.flush()  # what was handed over is done all the same
        with pytest.raises(WorkCancelled):
            rig.window.next_token_logits("what?")
    assert rig.window.next_token_logits("what?").shape[0] == engine.builder.token_count
