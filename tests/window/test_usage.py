"""A window's account equals hooks on the model over all threads: whatever runs is borne by somebody."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.patches import later_of, proving
from kamera.window import (
    Append,
    Arrange,
    Reorder,
    expect,
    former_of,
    keep_orbit,
    next_token_logits_of,
    respond,
    search,
)
from tests.models.hooks import hooked
from tests.window.rig import QUESTION, SYSTEM, borne, rig, watching

DEFAULT = ReusePolicy()
"""The policy of users: the other tests of this process are about windows that need no certificate."""

POLICIES = {
    "default": DEFAULT,
    "audited": replace(DEFAULT, audit=1.0),
    "forming always": replace(DEFAULT, forms="always"),
    "exact": ReusePolicy.exact(),
    "streaming": ReusePolicy(),
}
VERBS = ("append", "slide", "reorder", "reorder", "recall", "condition", "ask", "fork")
OPTIONS = {"max_new_tokens": 2, "do_sample": False}


@pytest.fixture(scope="module")
def shipped() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=3).episode(0, legends=4).frames]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_that_slides_recalls_reorders_and_forks(policy):
    own, chunks = rig("qwen2_5_vl", 5)
    draw = random.Random(7)
    with watching(own, later=True) as seen:
        store, given = ChunkStore.open("memory://"), POLICIES[policy]
        windows = [KameraWindow(own, store, SYSTEM, policy=given)]
        for chunk in chunks[:3]:
            windows[0].append(chunk)
        for _ in range(24):
            window = draw.choice(windows)
            verb = draw.choice(VERBS)
            if verb == "append" and len(window) < 5:
                window.append(draw.choice(chunks))
            elif verb == "recall" and len(window) < 5:
                window.recall(draw.choice(chunks[:3]))
            elif verb == "slide" and len(window) > 2:
                window.slide()
            elif verb == "reorder":
                window.reorder(draw.sample(range(len(window)), len(window)))
            elif verb == "condition":
                window.condition(draw.randrange(len(window)), draw.random() < 0.5)
            elif verb == "ask":
                window.generate(QUESTION, **OPTIONS)
            elif len(windows) < 3:
                windows.append(window.fork())
        for window in windows:
            window.flush()
    assert seen.forwards >= 20
    assert borne(seen, *(window.usage() for window in windows))


def test_questions_and_orbits(shipped, frames):
    """All else that a window does, on a model with a tokenizer: patches are proved by questions."""
    with watching(shipped, later=True) as seen:
        window = KameraWindow(shipped, ChunkStore.open("memory://"), testbed.SYSTEM, policy=DEFAULT)
        for frame in frames[:3]:
            window.append(frame)
        keep_orbit(window, 1)
        window.insert(1, "a note of the guard")
        window.replace(1, "another note of the guard")
        window.plan(Append(frames[3]))
        window.run(window.plan(Reorder([3, 2, 1, 0])))
        window.evict(0)
        search(window, frames[0])
        window.is_load_bearing(1, "What is the value of tag 3?", max_new_tokens=2)
        next_token_logits_of(window, ["which?", "where?"])
        respond(window, "And now?", Arrange([*window.slots, frames[3]]), **OPTIONS)
        window.generate("What is new?", keep=True, **OPTIONS)
        window.flush()
    assert borne(seen, window.usage())
    assert window.usage().background.forwards > 0, "what left was archived"


def test_a_loaded_window(tmp_path):
    own, chunks = rig("qwen2_5_vl")
    window = KameraWindow(own, ChunkStore.open("memory://"), SYSTEM, policy=POLICIES["forming always"])
    for chunk in chunks[:3]:
        window.append(chunk)
    window.reorder([2, 0, 1])
    window.save(tmp_path / "w")
    store = ChunkStore.open("memory://")
    with watching(own, later=True) as seen:
        loaded = KameraWindow.load(tmp_path / "w", own, store)
        loaded.flush()
        assert borne(seen, loaded.usage()) and seen.forwards, "a load asks the probe"
        loaded.slide()
        loaded.next_token_logits(QUESTION)
        loaded.flush()
    assert borne(seen, loaded.usage())


def test_a_window_that_goes_on_apart_and_one_that_begins_apart():
    own, chunks = rig("qwen2_5_vl")
    store = ChunkStore.open("memory://")
    with watching(own, later=True) as seen:
        window = KameraWindow(own, store, SYSTEM, policy=DEFAULT)
        for chunk in chunks[:2]:
            window.append(chunk)
        store.withheld.add(former_of(window).context, "an audit, says the test")
        window.reorder([1, 0])
        window.flush()
    assert borne(seen, window.usage())
    with watching(own, later=True) as seen:
        late = KameraWindow(own, store, SYSTEM, policy=DEFAULT)
        late.flush()
    assert borne(seen, late.usage()) and seen.tokens == len(SYSTEM), "its system prompt ran again"


def test_a_question_has_proofs_made_again_on_its_own_account(shipped, frames, monkeypatch):
    true_error = proving.kv_error
    monkeypatch.setattr(proving, "kv_error", lambda *parts: max(0.22, true_error(*parts)))
    store = ChunkStore.open("memory://")
    policy = POLICIES["forming always"]
    for time in ("first", "second"):  # patches that were just proved, then those out of the store
        window = KameraWindow(shipped, store, testbed.SYSTEM, policy=policy)
        for frame in frames[:3]:
            window.append(frame)
        window.flush()
        branch = window.fork()
        with watching(shipped, later=True) as seen:
            expect(branch, f"value of tag 17, {time}?")
            window.flush()
        assert borne(seen, branch.usage())
    assert seen.forwards > 0, "patches out of the store are doubted"
    assert branch.usage().now.forwards == 0


def test_work_that_fails_is_on_the_account():
    """A forward that breaks off in its last layer has run in the others."""
    own, chunks = rig("qwen2_5_vl")

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, says the test")

    broken: list[bool] = []
    failing = hooked(
        own, (own.decoder.layers[-1].register_forward_pre_hook, lambda *_: fail() if broken else None)
    )
    with failing, watching(own, later=True) as seen:
        window = KameraWindow(own, ChunkStore.open("memory://"), SYSTEM, policy=DEFAULT)
        window.append(chunks[0])
        broken.append(True)
        with pytest.raises(RuntimeError, match="out of memory"):
            window.append(chunks[1])
        broken.clear()
        window.append(chunks[2])
        window.flush()
    assert borne(seen, window.usage())


def test_windows_of_several_threads_bear_their_own_work():
    own, chunks = rig("qwen2_5_vl")
    store = ChunkStore.open("memory://")
    begin, windows = threading.Barrier(3), [None] * 3

    def run(number: int) -> None:
        begin.wait(60)
        window = KameraWindow(own, store, SYSTEM, policy=POLICIES["audited"])
        for chunk in (*chunks[number:], *chunks[:number]):
            window.append(chunk)
        window.slide()
        window.generate(QUESTION, **OPTIONS)
        windows[number] = window

    with watching(own, later=True) as seen:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        later_of(own).flush()
    assert borne(seen, *(window.usage() for window in windows))
