"""Answers of windows, one alone and several at once, against ``generate`` of transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from transformers import DynamicCache

from benchmarks.report import Row
from benchmarks.speed.timing import Arm, measure
from kamera import Backbone, ChunkStore, KameraWindow
from kamera.window import sequence_of

TEXT = "Note {0}: the ferry to island {0} leaves at {0} and comes back with mail, milk and a few guests. "
QUESTION = torch.arange(100, 116)
NOTES, TOKENS = 6, 32
"""Chunks of a window, and tokens of an answer; each is greedy and goes on to its last token."""


def answers(model: str, streams: Sequence[int], rounds: int, seconds: float) -> Iterator[Row]:
    """Seconds of an answer over those of transformers with the window's tokens cached, on real weights.

    ``tokens a second`` of n windows at once are over those of transformers, which answers one at a time.
    """
    backbone = Backbone.from_pretrained(model, dtype="float32")
    windows = [_window(backbone, number) for number in range(max(streams))]
    plain = _Plain(backbone, windows[0])
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    arms = [Arm("plain", plain.answer, plain.cache)]
    arms += [Arm(str(n), lambda n=n: _answer_at_once(windows[:n], options)) for n in streams]
    measured = measure(arms, "cpu", rounds=rounds, min_rounds=3, seconds=seconds)
    for n in streams:
        ratio = measured.ratio(str(n), "plain")
        yield {
            "windows at once": n,
            "seconds, over one of transformers": ratio.median,
            "middle half": [ratio.low, ratio.high],
            "tokens a second, over transformers": n / ratio.median,
            "rounds": measured.rounds,
        }


def _window(backbone: Backbone, number: int) -> KameraWindow:
    window = KameraWindow(backbone, ChunkStore.open("memory://"), system="You read notes.")
    for note in range(NOTES):
        window.append(TEXT.format(number * NOTES + note))
    window.flush()
    return window


def _answer_at_once(windows: Sequence[KameraWindow], options: Mapping[str, int]) -> None:
    threads = [
        threading.Thread(target=window.generate, args=(QUESTION,), kwargs=options) for window in windows
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Plain:
    """Transformers alone on a window's tokens and the question."""

    def __init__(self, backbone: Backbone, window: KameraWindow) -> None:
        self._model = backbone.engine.model
        window_ids = sequence_of(window).input_ids
        self._window, self._all = window_ids[None], torch.cat([window_ids, QUESTION])[None]

    def cache(self) -> DynamicCache:
        """A cache of the window's tokens: what a prefix cache holds."""
        cache = DynamicCache()
        with torch.no_grad():
            self._model(input_ids=self._window, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def answer(self, cache: DynamicCache) -> None:
        """An answer behind it."""
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(self._all)
        with torch.no_grad():
            self._model.generate(input_ids=self._all, attention_mask=mask, past_key_values=cache, **options)
