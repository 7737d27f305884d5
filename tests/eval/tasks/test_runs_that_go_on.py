"""Failing items, folders in use, parts of a set, arms that come later, and runs joined."""

import json
from pathlib import Path

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.eval.tasks.merge import merge
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.registry import make_task
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.selection import Selection, select
from kamera.testbed.benchmarks import write_mm_niah

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mm_niah(tmp_path_factory.mktemp("data"), episodes=2, questions=2, layouts=("LI",))


def niah():
    return MMNiah(["reasoning-text"], bare=True)


def lines(out):
    return [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]


def said(out):
    return {(line["item"], line["arm"]): (line["answer"], line["first_token"]) for line in lines(out)}


def scores(results):
    """As text: nan is nan."""
    return [
        repr((r.arm, r.summary, r.interval, r.agreement, r.flip_recover, r.kv_share)) for r in results.arms
    ]


class Sick(HfEngine):
    """Fails, as a GPU may, on every prompt that holds some words; ``well`` ends that."""

    words, well = "", False

    def decode(self, ids, *rest, **options):
        if not self.well and self.words in str(self.builder.detokenize(ids)):
            raise RuntimeError("CUDA error: an illegal memory access\nmore of it")
        return super().decode(ids, *rest, **options)


def test_a_failing_item_is_a_line_and_not_the_end_of_the_run(data, tmp_path):
    sick = Sick(*testbed.load())
    sick.words = next(iter(niah().load(data))).question
    arms = ("reprefill", "blind")
    results = run_task(sick, niah(), data, tmp_path, arms=arms)
    failed = [line for line in lines(tmp_path) if line["error"]]
    assert {line["item"] for line in failed} == {"reasoning-text-val/0"}
    assert {line["error"] for line in failed} == {"RuntimeError: CUDA error: an illegal memory access"}
    assert not any(line["answer"] for line in failed)
    assert (results.items, results.skipped) == (3, 1) and "illegal memory" in results.problems[0].what
    assert all(row.summary.n == 3 for row in results.arms)

    sick.well = True  # the same command asks what failed, and nothing else
    before = len(lines(tmp_path))
    again = run_task(sick, niah(), data, tmp_path, arms=arms)
    assert (again.items, again.problems) == (4, ())
    assert len(lines(tmp_path)) == before + 2


def test_shards_merged_are_the_whole_run(backbone, data, tmp_path):
    arms = ("reprefill", "blind")
    whole = run_task(backbone, niah(), data, tmp_path / "whole", arms=arms)
    parts = [tmp_path / f"part{i}" for i in (1, 2, 3)]
    for i, part in enumerate(parts, 1):
        run_task(backbone, niah(), data, part, arms=arms, shard=f"{i}/3")
    assert [len(lines(part)) for part in parts] == [4, 2, 2]
    joined = merge(parts, tmp_path / "joined")
    assert scores(joined) == scores(whole)
    assert said(tmp_path / "joined") == said(tmp_path / "whole")
    for file in (tmp_path / "whole" / "predictions").rglob("*.json*"):
        other = tmp_path / "joined" / file.relative_to(tmp_path / "whole")
        assert other.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "name", ["mm-niah", "milebench", "muirbench", "video-mme", "egoschema"], ids=lambda name: name
)
def test_samples_are_drawn_by_a_seed_and_shared_without_rest(name):
    data, task = FIXTURES / name.replace("-", "_"), make_task(name)

    def chosen(**options):
        return [item.id for _, item in select(Selection(**options), task, data) if hasattr(item, "id")]

    whole = chosen()
    three, two = chosen(sample=3, seed=1), chosen(sample=2, seed=1)
    assert len(three) == min(3, len(whole)) and set(two) <= set(three) <= set(whole)
    assert three == [id for id in whole if id in three] == chosen(sample=3, seed=1)
    assert len({tuple(chosen(sample=1, seed=seed)) for seed in range(8)}) > 1
    parts = [chosen(shard=f"{i}/2") for i in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(whole) and abs(len(parts[0]) - len(parts[1])) <= 1
