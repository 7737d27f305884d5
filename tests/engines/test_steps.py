"""Answers that several threads decode at once share their forwards, and each is the one it is alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine, answering
from kamera.sessions.stream import Seeded
from kamera.window import former_of
from tests.models import tiny
from tests.models.hooks import hooked
from tests.window.rig import QUESTION, Snapshot, make, rig, watching

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def all_wait(monkeypatch):
    """A row waits for all others, however slow the machine: so it is known which of them meet."""
    monkeypatch.setattr(answering, "_LEAST", 60.0)


@contextmanager
def sizes(backbone: HfEngine) -> Iterator[list[int]]:
    """Rows of the forwards of one token in the block."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        if tokens.shape[1] == 1:
            seen.append(tokens.shape[0])

    with hooked(backbone, (backbone.decoder.register_forward_pre_hook, note), with_kwargs=True):
        yield seen


class Gate:
    """A logits processor that lets no answer begin before all have their first logits."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties, timeout=60)

    def once(self) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        waiting = [self._barrier]

        def process(ids: Any, scores: torch.Tensor) -> torch.Tensor:
            for barrier in waiting:
                waiting.remove(barrier)
                barrier.wait()
            return scores

        return process


def at_once(windows: Sequence[KameraWindow], options: Sequence[dict[str, Any]]) -> list[Any]:
    """The answers of ``windows``, each in a thread; errors are values."""
    gate = Gate(1 if former_of(windows[0]).backbone.steps.why_serial else len(windows))

    def ask(window: KameraWindow, given: dict[str, Any]) -> Any:
        processors = [gate.once(), *given.get("logits_processor", ())]
        try:
            return window.generate(QUESTION, **{**GREEDY, **given, "logits_processor": processors})
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(windows)) as pool:
        return list(pool.map(ask, windows, options))


def sampled(seed: int, **options: Any) -> dict[str, Any]:
    return {**options, "logits_processor": [Seeded(seed, 0.8, 20, 0.9)]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", tiny.of_each_kind(f for f in (*tiny.FAMILIES, *tiny.LIMITED) if f != "unknown")
)
def test_rows_answer_as_they_do_alone(family):
    backbone, chunks = rig(family, 3)
    reason = backbone.steps.why_serial
    windows = [make(backbone, None, *chunks[:n]) for n in (3, 1, 2)]
    options = [{"max_new_tokens": 6}, sampled(5, max_new_tokens=4), {"max_new_tokens": 3}]
    alone = [w.generate(QUESTION, **{**GREEDY, **o}) for w, o in zip(windows, options, strict=True)]
    options[1] = sampled(5, max_new_tokens=4)
    with sizes(backbone) as rows:
        together = at_once(windows, options)
    assert [a.tolist() for a in together] == [a.tolist() for a in alone]
    assert bool(reason) is (family == "longrope")
    assert rows == ([1] * 10 if reason else [3, 3, 2, 1, 1])


# -- leaving -----------------------------------------------------------------------------------------


class Gone(Exception):
    """Nobody listens any more."""


def leaving(after: int) -> dict[str, Any]:
    """Options of an answer that fails at a token."""
    calls = [0]

    def process(ids: Any, scores: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > after:
            raise Gone
        return scores

    return {"max_new_tokens": 8, "logits_processor": [process]}


@pytest.mark.few(1)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_row_that_fails_leaves_the_others_alone(after):
    backbone, chunks = rig("qwen3_vl", 3)
    windows = [make(backbone, None, *chunks[:n]) for n in (1, 2, 3)]
    alone = [w.generate(QUESTION, **GREEDY, max_new_tokens=6) for w in windows]
    before = Snapshot.of(windows[1])
    with sizes(backbone) as rows:
        said = at_once(windows, [{"max_new_tokens": 6}, leaving(after), {"max_new_tokens": 6}])
    assert isinstance(said[1], Gone)
    assert torch.equal(said[0], alone[0]) and torch.equal(said[2], alone[2])
    assert rows[-5:] == [3] * min(after, 5) + [2] * (5 - after)  # its place is free at once
    assert before.matches(windows[1])
    assert len(windows[1].generate(QUESTION, **GREEDY, max_new_tokens=2)) == 2


def test_a_row_that_was_waited_for_in_vain_goes_on_beside_the_others(monkeypatch):
    backbone, chunks = rig("qwen3_vl", 3)
    windows = [make(backbone, None, *chunks[:n]) for n in (3, 1)]
    is_ahead, seen = threading.Event(), [list[torch.Tensor](), list[torch.Tensor]()]

    def watch(number: int, waits_for_other: bool) -> dict[str, Any]:
        def process(ids: Any, scores: torch.Tensor) -> torch.Tensor:
            seen[number].append(scores[0].clone())
            if number == 0 and len(seen[0]) == 6:
                monkeypatch.setattr(answering, "_LEAST", 60.0)
                is_ahead.set()
                end = time.monotonic() + 60
                while waits_for_other and not backbone.steps._asking_rows and time.monotonic() < end:
                    time.sleep(0.001)  # they meet, however slow the machine
            if number == 1 and len(seen[1]) == 3 and waits_for_other:
                assert is_ahead.wait(60)
            return scores

        return {"max_new_tokens": 9, "logits_processor": [process]}

    for number, window in enumerate(windows):
        window.generate(QUESTION, **GREEDY, **watch(number, False))
    monkeypatch.setattr(answering, "_LEAST", 0.05)
    alone = [torch.stack(scores) for scores in seen]
    is_ahead.clear()
    for scores in seen:
        scores.clear()
    with sizes(backbone) as rows:
        at_once(windows, [watch(0, True), watch(1, True)])
    for scores, reference in zip(seen, alone, strict=True):
        assert (torch.stack(scores) - reference).norm() <= 1e-5 * reference.norm()
    assert rows.index(1) < len(rows) - 1 - rows[::-1].index(2), rows  # apart, and together again


# -- counting ----------------------------------------------------------------------------------------


def test_accounts_bear_each_shared_forward_once_and_each_row_its_tokens():
    backbone, chunks = rig("qwen2_5_vl", 3)
    assert not backbone.steps.why_serial
    windows = [make(backbone, None, *chunks[:n]) for n in (1, 2, 3)]
    for window in windows:
        window.flush()
    before = [window.usage() for window in windows]
    tokens = (6, 4, 5)
    with watching(backbone, later=True) as seen:
        at_once(windows, [{"max_new_tokens": n} for n in tokens])
        for window in windows:
            window.flush()
    spent = [
        tuple(a - b for a, b in zip(w.usage().now[:2], u.now[:2], strict=True))
        for w, u in zip(windows, before, strict=True)
    ]
    assert [t for _, t in spent] == [len(QUESTION) + n - 1 for n in tokens]
    assert sum(f for f, _ in spent) == seen.forwards == 3 + 5
    assert sum(t for _, t in spent) == seen.tokens


# -- places ------------------------------------------------------------------------------------------


# -- any order ---------------------------------------------------------------------------------------

ACTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 5)),
    st.tuples(st.just("draw"), st.integers(1, 5)),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("append"), st.integers(0, 3)),
    st.tuples(st.just("slide"), st.just(0)),
    st.tuples(st.just("fork"), st.just(0)),
)
SCRIPTS = st.lists(st.lists(ACTS, min_size=2, max_size=6), min_size=2, max_size=4)


def played(backbone: HfEngine, chunks: Sequence[Any], script: Sequence[tuple[str, int]]) -> list[Any]:
    """What a thread is answered that does these things one after another, on forks of one window."""
    window, said = make(backbone, None, chunks[0], policy=ReusePolicy.exact()), []
    for place, (act, n) in enumerate(script):
        if act == "append" and len(window) < 4:
            window.append(chunks[n])
        elif act == "slide" and len(window) > 1:
            window.slide()
        elif act == "fork":
            window = window.fork()
        elif act in ("ask", "draw"):
            options = sampled(place, max_new_tokens=n) if act == "draw" else {"max_new_tokens": n}
            said.append(window.generate(QUESTION, **{**GREEDY, **options}).tolist())
        elif act == "fail":
            with pytest.raises(Gone):
                window.generate(QUESTION, **{**GREEDY, **leaving(n)})
    return said


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_any_joins_and_leaves_change_no_answer(family):
    backbone, chunks = rig(family, 4)

    @settings(max_examples=8, deadline=None, database=None, derandomize=True)
    @given(SCRIPTS)
    def holds(scripts: list[list[tuple[str, int]]]) -> None:
        want = [played(backbone, chunks, script) for script in scripts]
        with ThreadPoolExecutor(len(scripts)) as pool:
            got = list(pool.map(lambda script: played(backbone, chunks, script), scripts))
        assert got == want

    answering._LEAST, most = 0.01, answering._LEAST
    try:
        with sizes(backbone) as rows:
            holds()
    finally:
        answering._LEAST = most
    assert max(rows) > 1
