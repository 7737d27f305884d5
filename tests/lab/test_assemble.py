"""The count of assembled windows: what it prints is what hooks saw, and placing helps."""

from __future__ import annotations

import itertools
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, ReusePolicy
from kamera.window import Arrange
from lab.assemble import main, rows_of
from lab.placement import assembled
from lab.speed.presets import TINY
from tests.window.rig import FULL_RANK, is_a_reprefill, live, make, rig, same_bits, watching

FORMING = ReusePolicy(rank=FULL_RANK, forms="always", on_miss="form", certified=False)
SERVING = ReusePolicy(rank=FULL_RANK, forms="returning", on_miss="prefill", certified=False)


def test_chunks_of_an_earlier_window_run_nothing_where_they_are_placed(tmp_path, capsys):
    (row,) = rows_of(TINY.build(dtype=torch.float32), 8, 4, 3)[:1]
    assert (row["library"], row["window"], row["arrives"]) == (8, 4, "again")
    assert (row["chunks placed"], row["forwards placed"]) == (0.0, 0.0)
    assert row["chunks given"] > 0.0


def test_it_writes_what_it_prints(tmp_path, capsys):
    main(["--sizes", "4", "--draws", "1", "--output", str(tmp_path / "assemble.json")])
    assert '"library": 4' in (tmp_path / "assemble.json").read_text()
    assert "| 4 |" in capsys.readouterr().out


def filled(orders, chunks, backbone) -> ChunkStore:
    """A store that windows of these orders left behind."""
    store = ChunkStore.open("memory://")
    for order in orders:
        window = make(backbone, store, *(chunks[i] for i in order), policy=FORMING)
        window.evict(len(order) - 1)
        window.flush()
    return store


@settings(max_examples=5, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_an_assembly_runs_what_its_plan_showed_and_no_order_runs_less(random: Random):
    backbone, chunks = rig("qwen2_5_vl", 4)
    lengths = [random.randint(1, 4) for _ in range(3)]
    store = filled([random.sample(range(4), n) for n in lengths], chunks, backbone)
    window = make(backbone, store, *random.sample(chunks, random.randint(0, 2)), policy=SERVING)
    window.flush()
    there = {slot.chunk_id: slot for slot in window.slots}
    orders = [[there.get(c.id, c) for c in order] for order in itertools.permutations(chunks)]
    costs = [window.plan(Arrange(order)).cost for order in orders]
    shown = window.plan(assembled(window, chunks))
    assert (shown.cost.tokens, shown.cost.forwards) == min((c.tokens, c.forwards) for c in costs)
    with watching(backbone) as seen:
        window.run(shown)
    assert (seen.tokens, seen.forwards) == (shown.cost.tokens, shown.cost.forwards)
    assert is_a_reprefill(window, chunks)


def test_a_chunk_of_the_window_keeps_its_kv_and_others_leave():
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, *chunks[:3], policy=SERVING)
    window.flush()
    first, kv = window[0], live(window, 0)
    window.run(assembled(window, [chunks[3], chunks[0]]))
    assert [slot.chunk_id for slot in window.slots] == [chunks[0].id, chunks[3].id]
    assert window[0].number == first.number and same_bits(live(window, 0), kv)
    small = make(backbone, None, policy=SERVING, max_tokens=4 + 2 * 12 + 5)
    small.run(assembled(small, chunks))
    assert {slot.chunk_id for slot in small.slots} == {chunks[i].id for i in (0, 1, 3)}
