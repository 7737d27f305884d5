"""A job's account equals hooks on the model: proofs are on it."""

from __future__ import annotations

import pytest

from kamera import ChunkStore
from kamera.compile import CompileReport, Settings, read_plan, run_plan
from kamera.engines import Spent
from tests.compile.saved import pictures, vision_backbone, write_plan
from tests.window.rig import Seen, watching

PROVING = Settings(tolerance=0.05)
"""The default of users: the other tests of this process form patches that need no proof."""


@pytest.fixture
def plan(tmp_path):
    frames = [[{"image": str(tmp_path / name)}, f"picture {name}\n"] for name in pictures(tmp_path, 3)]
    return read_plan(write_plan(tmp_path, frames, [frames[1], frames[0]]))


def equals(report: CompileReport, seen: Seen) -> bool:
    now, later = report.usage()
    assert later == Spent() and now.seconds == report.seconds
    return (now.forwards, now.tokens, now.vision_encodes) == (seen.forwards, seen.tokens, seen.encodes)


@pytest.mark.parametrize("settings", [PROVING, Settings(orbit=True)])
def test_the_account_of_a_job_equals_hooks_on_the_model(tmp_path, plan, settings):
    backbone = vision_backbone()
    with ChunkStore.open(tmp_path / "store") as store:
        with watching(backbone, later=True) as seen:
            report = run_plan(plan, backbone, store, settings)
        assert report.forwards > 0 and not report.failures
        assert equals(report, seen)
        with watching(backbone, later=True) as seen:
            again = run_plan(plan, backbone, store, settings)
        assert equals(again, seen)
        assert again.usage().now[:3] == (0, 0, 0), "no window is opened where nothing is missing"
