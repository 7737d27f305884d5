"""From what windows did to a plan, and back: the traffic that recurs then runs no forward."""

from __future__ import annotations

import stat

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import ObjectCounts, read_plan, run_plan
from kamera.compile.mine import plan_text, recurring_windows
from kamera.window import former_of, read_trace
from tests.cli.run import kamera
from tests.compile.saved import SYSTEM, pictures, vision_backbone, vision_model, write_plan

SECRET = "the code is 4711"
BLIND = ReusePolicy(on_miss="prefill", forms="always")


@pytest.fixture
def frames(tmp_path) -> list[list]:
    return [[{"image": str(tmp_path / n)}, f"{SECRET} {n}\n"] for n in pictures(tmp_path, 4)]


def test_every_operation_is_a_line_of_ids_without_content(tmp_path, frames):
    path = tmp_path / "trace.jsonl"
    with ChunkStore.open("memory://") as store:
        window = KameraWindow(vision_backbone(), store, SYSTEM, trace=path)
        appended = [window.append(frame).slot for frame in frames[:3]]
        a, b, c = (slot.chunk_id for slot in appended)
        window.reorder([0, 2, 1])
        window.condition(2, False)
        window.slide()
        window.recall(a)
        window.evict(0)
        branch = window.fork()
        branch.append(frames[3])
        window.save(tmp_path / "saved")
        loaded = KameraWindow.load(tmp_path / "saved", vision_backbone(), store, trace=path)
        loaded.recall(c)
        window.generate("what is it?", max_new_tokens=1)
        d = branch.slots[-1].chunk_id
    events = list(read_trace(path))
    found = [(x.operation, [s.chunk_id for s in x.report.slots], x.first_placement) for x in events]
    assert found == [
        ("append", [a], 0),
        ("append", [a, b], 1),
        ("append", [a, b, c], 2),
        ("reorder", [a, c, b], 1),
        ("condition", [a, c, b], 3),
        ("slide", [c, b], 2),
        ("recall", [c, b, a], 2),
        ("evict", [b, a], 2),
        ("append", [b, a, d], 2),
        ("recall", [b, a, c], 2),
    ]
    assert {x.anchor for x in events} == {former_of(window).anchor.digest}
    assert [slot.length for slot in events[2].report.slots] == [slot.length for slot in appended]
    assert len({x.window for x in events}) == 3  # window, fork, loaded
    text = path.read_text()
    assert SECRET not in text
    assert SYSTEM not in text
    assert not any(x.pictures or any(s.label for s in x.report.slots) for x in events)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_recurring_traffic_runs_no_forward_once_compiled(tmp_path, frames, capsys):
    a, b, c, d = frames
    trace, plan, folder = tmp_path / "trace.jsonl", tmp_path / "plan.jsonl", tmp_path / "s"
    windows = [[a, b, c], [a, b, c], [a, b, d], [d, a]]

    def traffic(store, **given) -> int:
        forwards = 0
        for contents in windows:
            window = KameraWindow(vision_backbone(), store, SYSTEM, policy=BLIND, **given)
            forwards += sum(window.append(content).forwards for content in contents)
        return forwards

    with ChunkStore.open(folder) as store:
        # canonicals only: nothing is archived with a patch
        run_plan(read_plan(write_plan(tmp_path, [a], [b], [c], [d])), vision_backbone(), store)
        assert traffic(store, trace=trace) == 7
        (mined,) = recurring_windows(trace)
        length = {i.chunk_id: i.tokens for i in store.ls("canonical")}
        assert len(mined.chunks) == 3
        assert mined.saved_tokens == 3 * length[mined.chunks[1]] + 2 * length[mined.chunks[2]]
    done = kamera(capsys, "plan", trace, plan, "--system", SYSTEM, "--store", folder, "--format", "json")
    assert done.code == 0
    assert done.document["windows"][0]["saved_tokens"] == mined.saved_tokens
    assert plan.read_text() == plan_text([mined], SYSTEM)
    done = kamera(capsys, "compile", vision_model(), plan, "--store", folder, "--format", "json")
    assert done.document["patches"] == {"formed": 2, "reused": 0, "skipped": 0}
    assert done.document["saved_tokens"] == mined.forming_tokens
    with ChunkStore.open(folder) as store:
        # five arrivals of the mined window are served; d behind ab and a behind d did not recur
        assert traffic(store) == 2
        report = run_plan(read_plan(plan), vision_backbone(), store)
        assert report.patches == ObjectCounts(reused=2)


def test_windows_whose_order_is_free_are_placed_and_then_run_no_forward(tmp_path, frames, capsys):
    a, b, c, d = frames
    trace, plan, folder = tmp_path / "trace.jsonl", tmp_path / "plan.jsonl", tmp_path / "s"
    windows = [[a, b, c], [c, a, b], [b, c, a], [d, a]]

    def assembled(store, **given) -> list[int]:
        forwards = []
        for contents in windows:
            window = KameraWindow(vision_backbone(), store, SYSTEM, policy=BLIND, **given)
            forwards.append(window.assemble(contents).forwards)
        return forwards

    with ChunkStore.open(folder) as store:
        run_plan(read_plan(write_plan(tmp_path, [a], [b], [c], [d])), vision_backbone(), store)
        for contents in windows:
            window = KameraWindow(vision_backbone(), store, SYSTEM, policy=BLIND, trace=trace)
            for content in contents:
                window.append(content)
    done = kamera(capsys, "plan", trace, plan, "--system", SYSTEM, "--place", "--format", "json")
    assert done.code == 0
    [found] = done.document["windows"]
    assert (len(found["chunks"]), found["times"]) == (3, 3)
    assert done.document["all_given"]["windows"] == 4 and done.document["all_placed"]["windows"] == 2
    assert done.document["all_placed"]["forming_tokens"] < done.document["all_given"]["forming_tokens"] / 2
    plain = kamera(capsys, "plan", trace, tmp_path / "plain.jsonl", "--system", SYSTEM, "--format", "json")
    assert plain.document["windows"] == []
    assert kamera(capsys, "compile", vision_model(), plan, "--store", folder).code == 0
    with ChunkStore.open(folder) as store:
        assert assembled(store)[:3] == [0, 0, 0]
