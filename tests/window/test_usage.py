"""A window's account equals hooks on the model over all threads: whatever runs is borne by somebody."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.patches import background_of
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


@pytest.mark.few(1)
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
        background_of(own).flush()
    assert borne(seen, *(window.usage() for window in windows))
