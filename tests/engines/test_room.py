"""KV that stands in a live cache alone is what the model computed, whatever was shown since."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.content import Encoded
from kamera.engines import Span
from kamera.engines.hf import live as module
from kamera.ops import KV, apply_patch, kv_copy, kv_tensors
from tests.engines.compare import worst
from tests.models import samples, tiny
from tests.window.rig import same_bits

FAMILIES = ("qwen2_5_vl", "kimi_k25", "deepseek_v32", "gemma4")


class Pieces:
    """A live cache that holds KV, the spans it shows, and a copy of each KV as it was computed."""

    def __init__(self, family: str) -> None:
        self.backbone = tiny.backbone(family)
        self.still = (0,) * self.backbone.axes
        text, places = self.text(5, 0, 0)
        (anchor,) = self.backbone.prefill([text], [places])
        self.true: dict[int, KV] = {}
        self.spans = [Span(anchor, None, self.still)]
        self.live = self.backbone.live(holds=True)
        self.made = 0

    def text(self, count: int, start: int, seed: int) -> tuple[Encoded, torch.Tensor]:
        positions = torch.arange(start, start + count).expand(self.backbone.axes, -1)
        return Encoded(samples.text_ids(count, seed=seed)), positions

    def append(self, *counts: int) -> None:
        start = sum(span.length for span in self.spans)
        self.live.show(self.spans, room=sum(counts))
        runs = []
        for count in counts:
            self.made += 1
            runs.append(self.text(count, start, 100 + self.made))
            start += count
        texts, places = zip(*runs, strict=True)
        for kv in self.backbone.prefill(texts, places, self.live):
            self.true[id(kv)] = kv_copy(kv)
            self.spans.append(Span(kv, None, self.still))

    def show(self, chosen: list[tuple[int, int]]) -> None:
        """Chunks by number, each at an offset."""
        spans = self.spans[1:]
        moved = [Span(spans[n].kv, None, (by,) * self.backbone.axes) for n, by in chosen]
        self.spans = [self.spans[0], *moved]
        self.live.show(self.spans)

    def check(self) -> None:
        self.live.check_integrity()
        for n, span in enumerate(self.spans[1:], 1):
            assert same_bits(span.kv, self.true[id(span.kv)])
            want = apply_patch(self.true[id(span.kv)], None, self.backbone.layout, span.offset)
            assert worst(self.live.read(n), want) <= 1e-5 if n < len(self.live.shown) else True


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(1, 40), min_size=1, max_size=3)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("order"), st.integers(0, 999)),
    st.tuples(st.just("turn"), st.tuples(st.integers(0, 9), st.integers(-9, 9))),
    st.tuples(st.just("ask"), st.integers(1, 60)),
    st.tuples(st.just("fork"), st.integers(0, 999)),
)


def held(kv: KV) -> int:
    return sum(t.nbytes for t in kv_tensors(kv))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(operations=st.lists(OPERATIONS, min_size=3, max_size=12))
def test_it_is_bit_for_bit_what_was_computed(family, operations):
    pieces = Pieces(family)
    pieces.append(7, 12)
    for name, value in [*operations, ("ask", 50)]:
        count = len(pieces.spans) - 1
        here = [(n, span.offset[0]) for n, span in enumerate(pieces.spans[1:])]
        match name:
            case "append":
                pieces.append(*value)
            case "drop" if count > 1:
                pieces.show([one for one in here if one[0] != value % count])
            case "order":
                random.Random(value).shuffle(here)
                pieces.show(here)
            case "turn":
                number, by = value
                pieces.show([(n, by if n == number % count else was) for n, was in here])
            case "ask":
                pieces.live.show(pieces.spans)
                ids, places = samples.text_ids(value, seed=value), torch.arange(value) + 300
                pieces.backbone.ask([ids], places.expand(pieces.backbone.axes, -1), pieces.live)
            case "fork":
                branch = pieces.live.fork()
                random.Random(value).shuffle(here)
                spans = [pieces.spans[0], *(pieces.spans[1 + n] for n, _ in here[: count // 2 + 1])]
                branch.show(spans)
                pieces.backbone.ask(*questions(pieces), branch)
        pieces.check()


def questions(pieces: Pieces) -> tuple[list[torch.Tensor], torch.Tensor]:
    return [samples.text_ids(9, seed=9)], (torch.arange(9) + 300).expand(pieces.backbone.axes, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_write_that_fails_loses_nothing(family, monkeypatch):
    pieces = Pieces(family)
    pieces.append(30, 40, 20)
    real, calls = module.serve, []

    def failing(*args, **kwargs):
        calls.append(args)
        raise MemoryError("says the test")

    for chosen in ([(2, 0), (0, 3), (1, -4)], [(1, 7), (0, 0)], [(0, 1), (1, 2), (2, 3)]):
        monkeypatch.setattr(module, "serve", failing)
        spans = pieces.spans
        with pytest.raises(MemoryError):
            pieces.show(chosen)
        monkeypatch.setattr(module, "serve", real)
        pieces.spans = spans
        pieces.live.show(spans)
        pieces.check()
    assert calls


def test_threads_that_read_and_a_window_that_moves_see_the_same_kv():
    pieces = Pieces("qwen2_5_vl")
    pieces.append(30, 40, 50)
    kvs = [span.kv for span in pieces.spans[1:]]
    wrong, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            wrong.extend(kv for kv in kvs if not same_bits(kv, pieces.true[id(kv)]))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    draw = random.Random(0)
    spans = pieces.spans
    for _ in range(60):
        pieces.spans = spans
        order = draw.sample(range(3), draw.randint(1, 3))
        pieces.show([(n, draw.randint(-3, 3)) for n in order])
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_what_somebody_refers_to_is_copied_before_it_is_overwritten():
    pieces = Pieces("qwen2_5_vl")
    pieces.append(30, 40)
    gone = pieces.spans[2].kv
    pieces.show([(0, 0)])
    assert held(gone) == 0, "nothing stands in its place yet"
    pieces.append(60)
    assert held(gone) > 0 and same_bits(gone, pieces.true[id(gone)])


def test_what_left_and_is_referred_to_is_copied_before_its_room_grows():
    pieces = Pieces("qwen2_5_vl")
    pieces.append(30, 40)
    gone, block = pieces.spans[2].kv, pieces.live.tensors.parts[0]["k"]
    pieces.show([(0, 0)])
    assert held(gone) == 0, "nothing stands in its place yet"
    pieces.append(4_000)
    assert pieces.live.tensors.parts[0]["k"].shape[2] > block.shape[2], "the room has grown"
    assert held(gone) > 0 and same_bits(gone, pieces.true[id(gone)])
