"""Arms take turns, ratios are of one round, and the clock leaves out what goes before."""

from __future__ import annotations

import itertools

import pytest
import torch

from lab.speed import timing
from lab.speed.machine import copy_arm, machine
from lab.speed.timing import REPEATS, Arm, Measured, Spread, measure


class Work:
    """Arms that take as long as they are told, on a clock of their own."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.done: list[str] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def arm(self, name, *seconds, before=0.0):
        took = itertools.cycle(seconds)

        def run(*given):
            self.done.append(name)
            self.now += next(took)

        def prepare():
            self.now += before

        return Arm(name, run, prepare if before else None)


@pytest.fixture
def work(monkeypatch):
    return Work(monkeypatch)


def measured(**seconds):
    return Measured({name: tuple(taken) for name, taken in seconds.items()}, {})


def test_a_ratio_is_taken_round_by_round():
    # the machine slows down fourfold, and each round the edit is 10 times as fast
    timed = measured(prefill=(1.0, 2.0, 4.0), edit=(0.1, 0.2, 0.4))
    assert timed.ratio("prefill", "edit") == Spread(pytest.approx(10), pytest.approx(10), pytest.approx(10))
    # medians against each other would say 5
    timed = measured(prefill=(1.0, 1.0, 9.0), edit=(0.1, 0.2, 0.9))
    assert timed.ratio("prefill", "edit").median == pytest.approx(10)
    assert timed.ratio("prefill", "edit", factor=2).median == pytest.approx(20)


def test_a_spread_holds_the_middle_half():
    assert Spread.of([4, 1, 3, 2, 5]) == Spread(3, 2, 4)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(3, 2, 4).times(1e3) == Spread(3000, 2000, 4000)


def test_arms_take_turns_and_none_is_always_first(work):
    timed = measure([work.arm(name, 1.0) for name in "abc"], "cpu", rounds=3)
    assert "".join(work.done) == "abc" + "abc" + "bca" + "cab"  # the first round does not count
    assert timed.seconds == {name: (1.0, 1.0, 1.0) for name in "abc"}


def test_a_quick_arm_repeats_next_to_a_slow_one_and_counts_once(work):
    quick = work.arm("quick", 0.1, 0.1, 0.1, 0.5)
    timed = measure([quick, work.arm("slow", 100.0)], "cpu", rounds=2)
    assert work.done.count("slow") == 1 + 2
    assert work.done.count("quick") == 1 + 2 * REPEATS
    assert timed.seconds["quick"] == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_quick_arm_with_a_long_preparation_is_not_repeated(work):
    measure([work.arm("quick", 0.1, before=50.0), work.arm("slow", 100.0)], "cpu", rounds=2)
    assert work.done.count("quick") == 1 + 2


def test_preparation_is_off_the_clock(work):
    timed = measure([work.arm("a", 1.0, before=50.0)], "cpu", rounds=2)
    assert timed.seconds["a"] == (1.0, 1.0)


def test_what_was_prepared_is_handed_over():
    handed: list[int] = []
    count = itertools.count()
    measure([Arm("a", handed.append, lambda: next(count))], "cpu", rounds=2)
    assert handed == list(range(len(handed))) and len(handed) >= 3


def test_rounds_end_with_the_time_but_not_before_the_least(work):
    arm = work.arm("a", 1.0)
    assert measure([arm], "cpu", rounds=500, min_rounds=3, seconds=0.0).rounds == 3
    assert measure([arm], "cpu", rounds=500, min_rounds=3, seconds=10.5).rounds == 10
    assert measure([arm], "cpu", rounds=5, min_rounds=3, seconds=1e9).rounds == 5


def test_arms_need_names_of_their_own():
    arm = Arm("a", lambda: None)
    for arms in ([], [arm, arm]):
        with pytest.raises(ValueError, match="each by a name of its own"):
            measure(arms, "cpu")


def test_a_copy_moves_half_in_and_half_out():
    into = copy_arm("copy", 4096, "cpu").run()
    assert into.numel() == 2048 and bool((into == 1).all())


def test_the_machine_is_named():
    found = machine("cpu")
    assert found["cores"] >= 1 and found["processor"] and found["torch"] == torch.__version__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_device_has_a_clock_of_its_own():
    x = torch.ones(2000, 2000, device="cuda")
    timed = measure([Arm("a", lambda: x @ x)], "cuda", rounds=3)
    own = timed.device_spread("a")
    assert own is not None and 0 < own.median <= timed.spread("a").median
