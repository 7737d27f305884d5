"""The rivals on whole windows: what each recomputes, and what it is equal to."""

from __future__ import annotations

import pytest
import torch

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.eval.adapter import ArmQuestion, Unit
from kamera.eval.arms import arms_named, arms_of
from kamera.eval.desk import Desk
from kamera.ops import relocate_kv
from lab.baselines.windows import ARMS, CacheBlend, Conduit, FirstK, Sink, VLCache

MIXED = [FirstK, Sink, Conduit, VLCache]


@pytest.fixture(scope="module")
def desk():
    desk = Desk(HfEngine(*testbed.load()), testbed.SYSTEM)
    frames = testbed.World(78).episode(0, layout="LLRLI").frames
    for index, frame in enumerate(frames):
        desk.encode_once(Unit(f"u{index}", frame.content))
    return desk


QUESTION = ArmQuestion("value of tag 37?", (), 1)
WHOLE = ("u0", "u1", "u2", "u3", "u4")


def placed(desk, adapter, *windows):
    for name in desk.facts:
        adapter.encode(Unit(name, desk.chunks[name]))
    for window in windows:
        adapter.place(window)
    return adapter.ask(QUESTION)


@pytest.fixture(scope="module")
def exact(desk):
    return placed(desk, arms_named(["reprefill"])["reprefill"](desk), WHOLE)


@pytest.fixture(scope="module")
def blind(desk):
    adapter = arms_named(["blind"])["blind"](desk)
    return placed(desk, adapter, WHOLE), adapter.shown


def fresh_rows(desk, adapter, shown, index):
    """Tokens of a unit, per layer, whose KV is not blind reuse's."""
    rows = []
    mixed = adapter.shown[index].kv
    canonical = relocate_kv(shown[index].kv, desk.backbone.layout, shown[index].offset)
    for new, old in zip(mixed, canonical, strict=True):
        differs = torch.stack([(new[n] - old[n]).abs().sum((0, 2)) > 0 for n in new]).any(0)
        rows.append(differs.nonzero().flatten().tolist())
    return rows


@pytest.mark.parametrize("cls", MIXED)
def test_all_tokens_recomputed_are_the_exact_window(desk, exact, cls):
    answer = placed(desk, cls(desk, 100 if cls is not VLCache else 10_000), WHOLE)
    assert torch.allclose(answer.logits, exact.logits, atol=2e-4)


@pytest.mark.parametrize("cls", [FirstK, Conduit, VLCache])
def test_no_token_recomputed_is_blind_reuse(desk, blind, cls):
    assert torch.allclose(placed(desk, cls(desk, 0), WHOLE).logits, blind[0].logits, atol=1e-4)


def test_first_k_sink_and_conduit_recompute_their_share(desk, blind):
    tokens = desk.facts["u4"].length
    count = round(0.1 * tokens)
    for cls, expected in ((FirstK, range(count)), (Sink, (*range(4), *range(tokens - count + 4, tokens)))):
        adapter = cls(desk, 10)
        answer = placed(desk, adapter, WHOLE)
        rows = fresh_rows(desk, adapter, blind[1], 4)
        assert all(set(row) <= set(expected) for row in rows) and rows[-1] == list(expected)
        counts = sum(round(0.1 * desk.facts[name].length) for name in WHOLE[1:])
        assert answer.recomputed_tokens == counts and answer.forwards == 4
    conduit = Conduit(desk, 10)
    placed(desk, conduit, WHOLE)
    rows = fresh_rows(desk, conduit, blind[1], 4)
    assert len(rows[-1]) == count and all(set(row) <= set(rows[1]) for row in rows[1:])


def test_cacheblend_recomputes_fewer_tokens_in_deeper_layers(desk, blind):
    adapter = CacheBlend(desk, 15)
    placed(desk, adapter, WHOLE)
    counts = [len(row) for row in fresh_rows(desk, adapter, blind[1], 4)][1:]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] > 0
    assert sum(counts) / len(counts) == pytest.approx(0.15 * desk.facts["u4"].length, rel=0.1)


def test_vlcache_recomputes_heads_as_long_as_the_profile_says(desk, blind):
    adapter = VLCache(desk, 5)
    placed(desk, adapter, WHOLE)
    profile = desk.prepared["vlcache"]
    rows = fresh_rows(desk, adapter, blind[1], 4)
    assert all(row == list(range(len(row))) for row in rows)
    share, live = 0.05 * desk.facts["u4"].length * len(adapter.live_layers), sum(profile[1:])
    assert [len(row) for row in rows] == [0, *(round(share * weight / live) for weight in profile[1:])]
    assert len(set(map(len, rows[1:]))) > 1


def test_recent_is_the_exact_window_of_the_last_four(desk):
    answer = placed(desk, ARMS["recent@4"](desk), WHOLE)
    last = placed(desk, arms_named(["reprefill"])["reprefill"](desk), WHOLE[1:])
    assert torch.allclose(answer.logits, last.logits, atol=1e-4) and answer.forwards == 4


def test_streaming_vlm_keeps_what_stays_as_survivors_do(desk):
    trace = (WHOLE[:4], WHOLE[1:])
    answer = placed(desk, ARMS["streaming_vlm"](desk), *trace)
    kept = placed(desk, arms_named(["keep"])["keep"](desk), *trace)
    assert torch.allclose(answer.logits, kept.logits, atol=1e-4)
    assert answer.forwards == 1 and answer.recomputed_tokens == desk.facts["u4"].length


def test_the_rivals_are_arms_of_the_command_line():
    found = arms_of(["lab.baselines.windows"])
    assert set(found) == {
        *("cacheblend@15%", "vlcache@2%", "vlcache@5%", "conduit@10%", "first-k@10%", "sink@10%"),
        *("recent@4", "streaming_vlm"),
    }
    assert list(arms_named(found, found)) == [*found]
