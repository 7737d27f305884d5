"""Rivals in a stream: what each computes, and what it is equal to."""

from __future__ import annotations

import pytest
import torch

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.eval.desk import Desk
from kamera.patches import prefill_anchor
from lab.baselines.windows import ARMS, Conduit, VLCache
from lab.streaming.adapted import Adapted
from lab.streaming.eraser import Erased, Eraser, train
from lab.streaming.rivals import Recent, Streaming
from lab.streaming.stream import FRAMES, HELD_OUT

WINDOW = 3


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def anchor(backbone):
    return prefill_anchor(backbone, testbed.SYSTEM)


@pytest.fixture(scope="module")
def frames(backbone):
    episode = testbed.World(HELD_OUT).episode(0, layout=FRAMES[1])
    return [backbone.chunk(frame.content) for frame in episode.frames[:5]]


@pytest.fixture(scope="module")
def question(backbone, anchor):
    return backbone.builder.tokenize("value of tag 37?" + anchor.tail)


def shown(keeper, frames):
    for frame in frames:
        keeper.see(frame)
    return keeper


@pytest.mark.slow
@pytest.mark.parametrize("cls, percent", [(Conduit, 100), (VLCache, 10_000)])
def test_a_repair_of_all_tokens_is_recent(backbone, anchor, frames, question, cls, percent):
    desk = Desk(backbone, testbed.SYSTEM)
    repaired = shown(Adapted(desk, lambda d: cls(d, percent), WINDOW), frames)
    recent = shown(Recent(backbone, anchor, WINDOW), frames)
    assert torch.allclose(repaired.logits(question), recent.logits(question), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cacheblend@15%", "vlcache@2%", "vlcache@5%", "conduit@10%"])
def test_a_step_costs_a_canonical_and_the_recomputed_share(backbone, frames, name):
    keeper = shown(Adapted(Desk(backbone, testbed.SYSTEM), ARMS[name], WINDOW), frames)
    new, behind = frames[-1].num_tokens, sum(f.num_tokens for f in frames[-WINDOW + 1 :])
    layers = len(backbone.layout)
    recomputed = keeper.computed - new
    if name.startswith("vlcache"):
        assert 0 < recomputed <= behind * 0.05 * layers
    else:  # two whole layers, of which the second is the check layer, and the share in the others
        assert recomputed == pytest.approx(behind * (2 + (layers - 2) * keeper.arm.share) / layers, rel=0.1)
    assert keeper.arm.forwards == WINDOW - 1


@pytest.mark.slow
def test_an_idle_eraser_leaves_every_frame_in_the_cache(backbone, anchor, frames, question):
    idle = Erased(backbone, anchor, WINDOW, Eraser.idle(backbone.layout))
    whole = Streaming(backbone, anchor, len(frames))
    erased = shown(idle, frames).logits(question)
    assert torch.allclose(erased, shown(whole, frames).logits(question), atol=1e-4)


@pytest.mark.slow
def test_a_trained_eraser_changes_the_erased_interval_alone(backbone, anchor, frames, question):
    eraser, losses = train(backbone, anchor, WINDOW, samples=1, epochs=4)
    assert 0 <= losses[-1] < losses[0]  # a KL
    assert all(parameter.grad is None for parameter in backbone.model.parameters())
    keeper = Erased(backbone, anchor, WINDOW, eraser)
    shown(keeper, frames[:WINDOW])
    before = list(keeper.held)
    keeper.see(frames[WINDOW])
    assert keeper.held[:-1] == before[1:]  # the very same KV, at the same places
    (gone,) = keeper.gone
    assert torch.equal(gone.positions, before[0].positions)
    deepest = {name: (gone.kv[-1][name] - kv).abs().max() for name, kv in before[0].kv[-1].items()}
    assert max(deepest.values()) > 1e-3
    assert len(keeper.every) == WINDOW + 1
