"""Terms of composed patches as a job: each formed once, by one forward, and what windows compose from."""

from __future__ import annotations

import itertools

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import Counts, PlanError, Settings, run_plan
from kamera.store import ObjectInfo
from tests.compile.saved import SYSTEM, pictures, vision_backbone
from tests.compile.test_wishes import plan_of

PAIRS = Settings(rank=64, pairs=True)
COMPOSED = ReusePolicy(minimum="composed", rank=64, max_doubt=1.0, composed_up_to=6, forms="always")
ALL = 4 * 3 + 4 * 3 * 2


@pytest.fixture
def frames(tmp_path) -> list[list]:
    return [[{"image": str(tmp_path / name)}, f"picture {name}\n"] for name in pictures(tmp_path, 4)]


def terms(store: ChunkStore) -> list[ObjectInfo]:
    return [info for info in store.ls("exact") if len(info.antecedents) < 3]


def window(store, frames, **options) -> KameraWindow:
    made = KameraWindow(vision_backbone(), store, SYSTEM, policy=COMPOSED, **options)
    for frame in frames:
        made.append(frame)
    return made


def test_a_line_of_four_is_served_in_every_order(tmp_path, frames):
    with ChunkStore.open(tmp_path / "s") as store:
        report = run_plan(plan_of(tmp_path, (frames, {})), vision_backbone(), store, PAIRS)
        assert report.terms is not None and report.terms.counts.formed == len(terms(store)) == ALL
        assert report.windows == 1 and report.terms.reorders == ALL / 3
        # the anchor, the canonicals, the terms, and the last chunk behind the three others in their order
        assert report.forwards == 1 + 4 + ALL + 1
        again = run_plan(plan_of(tmp_path, (frames, {})), vision_backbone(), store, PAIRS)
        assert (again.forwards, again.terms.counts.formed, again.terms.reorders) == (0, 0, 0.0)
        made = window(store, frames)
        assert made.reorder([3, 1, 0, 2]).forwards == 0
        assert [slot.guarantee for slot in made.slots] == ["exact", "patched", "patched", "composed"]


def test_a_window_and_a_job_form_the_same_terms(tmp_path, frames):
    frames = frames[:3]
    with ChunkStore.open(tmp_path / "s") as store, ChunkStore.open("memory://") as other:
        run_plan(plan_of(tmp_path, (frames, {"pairs": True})), vision_backbone(), store, Settings(rank=64))
        made = window(other, frames)
        report = made.form_pairs()
        assert {info.key for info in terms(store)} == {info.key for info in terms(other)}
        # appends had formed the second behind the first, and the third behind both
        (note,) = report.notes
        assert "10 terms formed in 10 forwards, 2 were stored: repaid after 5 reorders" in note
        assert (report.forwards, made.form_pairs().forwards) == (10, 0)


def test_one_chunk_costs_one_forward_a_term_and_one_a_pair(tmp_path, frames):
    with ChunkStore.open("memory://") as store:
        report = window(store, frames).form_pairs(3)
        assert report.forwards == 3 + 6 + 6
        mine = [info for info in terms(store) if info.chunk_id == report.slots[3].chunk_id]
        assert len(mine) == 3 + 6


def test_triples_cost_one_forward_each_and_what_they_stand_behind(tmp_path, frames):
    with ChunkStore.open("memory://") as store:
        made = window(store, frames)
        report = made.form_pairs(3, triples="all")
        # singles, pairs, and the triples that the append had not formed; then two and three in a row
        assert report.forwards == 3 + 6 + 5 + 6 + 5
        mine = [info for info in store.ls("exact") if info.chunk_id == report.slots[3].chunk_id]
        assert len(mine) == 3 + 6 + 6
        assert made.form_pairs(3, triples="all").forwards == 0


def test_standing_triples_are_those_that_departures_read(tmp_path, frames):
    with ChunkStore.open("memory://") as store:
        made = window(store, [*frames, [{"image": frames[0][0]["image"]}, "once more\n"]])
        report = made.form_pairs(4, triples="standing")
        order = [slot.chunk_id for slot in report.slots[:4]]
        mine = [i.antecedents for i in store.ls("exact") if i.chunk_id == report.slots[4].chunk_id]
        triples = {behind for behind in map(tuple, mine) if len(behind) == 3}
        assert triples == set(itertools.combinations(order, 3))
        with pytest.raises(ValueError, match="triples 'some': give 'standing', 'all' or None"):
            made.form_pairs(triples="some")
        assert made.form_pairs(4, triples="standing").forwards == 0


def test_a_job_forms_triples_that_a_window_reads(tmp_path, frames):
    with ChunkStore.open(tmp_path / "s") as store:
        settings = Settings(rank=64, pairs=True, triples=True)
        report = run_plan(plan_of(tmp_path, (frames, {})), vision_backbone(), store, settings)
        assert report.terms is not None and report.terms.counts.formed == ALL + 4 * 6
        assert window(store, frames).form_pairs(triples="all").forwards == 0


def test_lines_without_pairs_or_of_one_chunk_form_no_terms(tmp_path, frames):
    with ChunkStore.open("memory://") as store:
        plan = plan_of(tmp_path, (frames[:3], {"pairs": False}), (frames[3:], {}))
        report = run_plan(plan, vision_backbone(), store, PAIRS)
        assert report.terms is None and report.patches == Counts(2)


def test_a_wish_that_is_neither_true_nor_false_is_refused(tmp_path, frames):
    with pytest.raises(PlanError, match="pairs is 1: give true or false"):
        plan_of(tmp_path, (frames, {"pairs": 1}))
