"""The walk tables count frames of kamera, writes and forwards, the same at every run."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import pytest

from kamera import ReusePolicy, testbed
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from kamera.ops import NO_KV, kv_bytes
from lab.replay.shapes import thin
from lab.walks.__main__ import main, table
from lab.walks.counter import profiled, tapped
from lab.walks.memory import shares
from lab.walks.operations import returns, survivals, walk, walks
from lab.walks.plans import plans
from lab.walks.turns import growth, turns


class Done:
    forwards = 0


def test_only_frames_of_the_package_count():
    def work():
        sorted([1], key=lambda n: n)  # of this file: none of it counts
        kv_bytes(NO_KV)
        return Done()

    found = walk("x", work)
    assert found.files == 1 and found.depth >= 1 and 1 <= found.calls <= 3


def test_calls_of_one_function_are_told_apart():
    with profiled() as counter:
        kv_bytes(NO_KV)
        kv_bytes(NO_KV)
    assert counter.calls_of("ops/kv.py", "kv_bytes") == 2
    assert counter.calls_of("ops/kv.py", "kv_map") == 0


def test_a_tapped_function_counts_the_calls_of_all_threads_and_is_itself_again():
    before = os.getpid
    with tapped(os, "getpid") as threads:
        assert os.getpid() == before()
        other = threading.Thread(target=os.getpid)
        other.start()
        other.join()
    assert len(threads) == len(set(threads)) == 2 and os.getpid is before


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    backbone = HfEngine(*testbed.load())
    folder, policy = tmp_path_factory.mktemp("walks"), ReusePolicy(certified=True, audit=0.0)
    return [list(walks(backbone, folder / str(turn), 0, policy)) for turn in range(3)]


@pytest.mark.slow
def test_a_warm_walk_is_the_same_again(found):
    for one, again in zip(found[1], found[2], strict=True):
        # a store looks again at a folder that was written a moment ago: calls and files more or less
        assert again == replace(one, calls=again.calls, files=again.files, depth=again.depth)
        assert again.calls == pytest.approx(one.calls, rel=0.1)
        assert again.files == pytest.approx(one.files, abs=4)


@pytest.mark.slow
def test_a_slide_by_which_chunks_survive_or_with_stored_patches_runs_no_forward(tmp_path):
    backbone = HfEngine(*testbed.load())
    (found,) = survivals(backbone, tmp_path / "survivors", 0, ReusePolicy.streaming())
    (repaired,) = [
        w for w in walks(backbone, tmp_path / "repaired", 0, ReusePolicy.exact()) if w.operation == "slide"
    ]
    assert found.forwards == 0 < repaired.forwards
    (patched,) = returns(backbone, tmp_path / "again", 0, ReusePolicy(certified=True))
    assert patched.forwards == 0 and found.calls < patched.calls, "four patches are read"


def test_memory_is_told_as_a_share_of_a_plain_cache(backbone):
    appended, slid = shares(backbone, 2_000)
    assert appended.tokens >= 2_000 > slid.tokens > 1_500
    assert 1.0 <= appended.live + appended.copies < 1.5 and appended.encodings > 0.0, "KV is held once"


@pytest.mark.slow
def test_an_operation_that_comes_again_runs_no_forward(found):
    forwards = {w.operation: w.forwards for w in found[1]}
    assert forwards["append, new"] == forwards["recall"] == forwards["reorder"] == 1
    assert forwards["recall, again"] == forwards["reorder, again"] == 0
    assert table(found[1]).count("\n") == len(forwards) + 1


@pytest.mark.parametrize("layers", [1, 3])
def test_a_look_at_the_model_runs_in_c_however_deep_it_is(layers):
    model = thin(layers, "own")
    assert model.fingerprint
    with profiled() as counter:
        assert model.fingerprint
    assert counter.calls < 50


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return thin(2, "own")


def test_a_turn_says_what_ran_and_was_written_before_its_first_token(backbone, tmp_path):
    first, second, third = turns(backbone, tmp_path / "appended", None, 3)
    assert second.forwards == third.forwards == (1, 0) and second.plans == 1
    assert second.tokens.before == third.tokens.before > 64, "a picture and its words"
    assert first.calls > second.calls > 1_000, "the first opens the window"
    assert min(second.puts.before, second.syncs.before) >= 0 and sum(first.syncs) > 0
    assert growth([first, second, third], 2) == {
        "turn 1": round(third.calls / first.calls, 3),
        "turn 2": round(third.calls / second.calls, 3),
    }


def test_a_turn_that_loses_a_picture_runs_what_stands_behind_it(backbone, tmp_path):
    *_, before, after = turns(backbone, tmp_path / "last", policies.keep_last_images(2), 3)
    assert after.tokens.before > before.tokens.before + 64


def test_plans_of_each_request_are_timed(backbone):
    found = list(plans(backbone, slots=4, rounds=2))
    assert len({name for name, *_ in found}) == len(found) == 7
    assert all(0.0 < median <= largest for _, median, largest in found)


@pytest.mark.slow
def test_the_tables_are_written(tmp_path, capsys):
    assert (
        main(["--layers=1", "--turns=2", "--slots=8", "--memory=500", f"--output={tmp_path / 'walks.json'}"])
        == 0
    )
    document = json.loads((tmp_path / "walks.json").read_text())
    assert (
        document["command"] == "python -m lab.walks --layers 1 --turns 2 --slots 8 --memory 500"
        and "commit" in document
    )
    assert [len(told["turns"]) for told in document["conversations"].values()] == [2, 2, 2]
    assert "plan of 8 slots" in capsys.readouterr().out
