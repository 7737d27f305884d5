"""The walk table counts frames of kamera, the same at every run."""

from dataclasses import replace

import pytest

from kamera import Backbone, testbed
from kamera.ops import kv_bytes
from lab.walks import table, walk, walks


class Done:
    forwards = 0


def test_only_frames_of_the_package_count():
    def work():
        sorted([1], key=lambda n: n)  # of this file: none of it counts
        kv_bytes(())
        return Done()

    found = walk("x", work)
    assert found.files == 1 and found.depth >= 1 and 1 <= found.calls <= 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    backbone = Backbone(*testbed.load())
    folder = tmp_path_factory.mktemp("walks")
    return [list(walks(backbone, folder / str(turn), 0)) for turn in range(3)]


def test_a_warm_walk_is_the_same_again(found):
    for one, again in zip(found[1], found[2], strict=True):
        # a store looks again at a folder that was written a moment ago: a few calls more or less
        assert again == replace(one, calls=again.calls)
        assert again.calls == pytest.approx(one.calls, rel=0.05)


def test_each_operation_runs_the_forwards_its_name_says(found):
    forwards = {w.operation: w.forwards for w in found[1]}
    assert forwards["recall, patch missing"] == 1 and forwards["reorder, patches missing"] == 4
    assert {o for o, n in forwards.items() if n == 0} == {
        "recall, patch stored",
        "reorder, patches stored",
        "slide",
    }


def test_a_walk_with_forwards_is_longer_than_one_without(found):
    calls = {w.operation: w.calls for w in found[1]}
    assert calls["recall, patch missing"] > calls["recall, patch stored"]
    assert calls["reorder, patches missing"] > calls["reorder, patches stored"] > 0
    assert table(found[1]).count("\n") == len(calls) + 1
