"""MuirBench, Video-MME and EgoSchema from their files through real windows to predictions."""

import json
from pathlib import Path

import pytest

from kamera.engines.hf import HfEngine
from kamera.eval.tasks.registry import make_task
from kamera.eval.tasks.report import Results
from kamera.eval.tasks.run import run_task
from tests.eval.tasks.fixtures.make_choice_sets import HERE, UIDS
from tests.models.processors import matching_model, picture_processor

ARMS = ("reprefill", "blind", "patch@4")


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    """Takes pictures, no videos: clips go in as their frames."""
    return HfEngine(matching_model(), picture_processor())


def run(backbone: HfEngine, name: str, out: Path, **options: object) -> Results:
    results = run_task(
        backbone, make_task(name, **options), HERE / name.replace("-", "_"), out, arms=ARMS, limit=2
    )
    assert not results.problems
    assert [row.arm for row in results.arms] == list(ARMS)
    assert all(row.summary.n == 2 and 0.0 <= row.summary.official <= 1.0 for row in results.arms)
    assert results.arm("patch@4").kv_share > results.arm("blind").kv_share == 0.0
    return results


def test_every_arm_answers_muirbench(tmp_path: Path, backbone: HfEngine) -> None:
    run(backbone, "muirbench", tmp_path)
    for arm in ARMS:
        lines = (tmp_path / "predictions" / arm / "muirbench.jsonl").read_text().splitlines()
        assert [json.loads(line)["idx"] for line in lines] == ["17", "18"]


def test_every_egoschema_response_is_submitted_or_unread(tmp_path: Path, backbone: HfEngine) -> None:
    results = run(backbone, "egoschema", tmp_path, num_frames=4)
    for arm in ARMS:
        submission = json.loads((tmp_path / "predictions" / arm / "egoschema.json").read_text())
        assert all(uid in UIDS and index in range(5) for uid, index in submission.items())
        unread = sum(g.n for g in results.arm(arm).summary.groups if g.by == "extraction")
        assert len(submission) + unread == 2
