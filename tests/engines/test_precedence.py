"""Calls go before later work: order and KV of forwards that are interrupted between their layers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

from kamera.engines import Account, Sampling, Span, WorkCancelled, calls_of, count_as_later, precedence
from kamera.engines.hf import HfEngine, forwards
from kamera.ops import Design, token_kernel
from tests.models import samples, tiny
from tests.models.hooks import hooked

LONG = 60  # seconds: nothing here takes that long


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Later work gives way for as long as a call takes, on the slowest machine too."""
    monkeypatch.setattr(precedence, "PATIENCE", LONG)


def at_layers(backbone: HfEngine, at_layer) -> AbstractContextManager[None]:
    """``at_layer(index)`` in front of each layer, behind the backbone's own hook."""
    layers = enumerate(backbone.decoder.layers)
    return hooked(backbone, *[(m.register_forward_pre_hook, lambda *_, i=i: at_layer(i)) for i, m in layers])


class Meeting:
    """A forward of later work in a thread of its own, and a call that comes while it is in a layer."""

    def __init__(self, backbone: HfEngine, tokens: int = 6, unwanted=precedence.never) -> None:
        self.backbone, self.unwanted = backbone, unwanted
        self.seen: list[str] = []
        self.reached = [threading.Event() for _ in backbone.decoder.layers]
        self.go_on = [threading.Event() for _ in backbone.decoder.layers]
        self._worker: int | None = None
        self._span = backbone.encode(backbone.chunk_from_tensors(samples.text_ids(tokens, 7)))
        self._places = torch.arange(tokens).expand(backbone.axes, -1)

    def work(self):
        """The forward; its KV."""
        self._worker = threading.get_ident()
        with count_as_later(self.backbone, (), self.unwanted):
            return forwards.run(self.backbone, self._span, self._places)[0]

    def plain(self):
        """The same forward, which nothing interrupts."""
        return forwards.run(self.backbone, self._span, self._places)[0]

    def at_layer(self, index: int) -> None:
        if threading.get_ident() != self._worker:
            self.seen.append("call")
            return
        self.seen.append(f"later {index}")
        self.reached[index].set()
        assert self.go_on[index].wait(LONG)


def call(backbone: HfEngine, chunk) -> list[torch.Tensor]:
    """What a request runs: an encode, a prefill, a question, rows of questions."""
    encoded = backbone.encode(chunk)
    places = backbone.positions([chunk.input_ids], [chunk.position_inputs()])
    kv, _ = forwards.run(backbone, encoded, places)
    kept = [t.clone() for layer in kv for t in layer.values()]
    ids = samples.text_ids(3, 5)
    behind = torch.arange(3).expand(backbone.axes, -1) + int(places.max()) + 1
    kept.append(forwards.forward(backbone, ids, behind, forwards.make_cache(backbone, [kv])))
    return [
        *kept,
        forwards.forward_batch(
            backbone, torch.stack([ids, ids + 1]), behind, forwards.make_cache(backbone, [kv])
        ),
    ]


@pytest.mark.parametrize("family", tiny.of_each_kind(sorted(tiny.FAMILIES)))
def test_a_call_may_come_between_any_two_layers_and_neither_changes_the_other(family):
    backbone = tiny.backbone(family)
    chunk = samples.chunk(backbone, samples.sample(family, 3))
    meeting = Meeting(backbone)
    want, alone = meeting.plain(), call(backbone, chunk)
    account = Account()
    with ThreadPoolExecutor(1) as pool, at_layers(backbone, meeting.at_layer):
        working = pool.submit(meeting.work)
        for reached, go_on in zip(meeting.reached, meeting.go_on, strict=True):
            assert reached.wait(LONG)
            if not backbone.quiet:
                go_on.set()
                continue
            with account.count_now(backbone):
                go_on.set()
                got = call(backbone, chunk)
            assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))
        kv = working.result(LONG)
    assert all(torch.equal(x[n], y[n]) for x, y in zip(kv, want, strict=True) for n in y)
    assert account.usage.now.forwards == (3 * len(backbone.decoder.layers) if backbone.quiet else 0)


def test_a_call_waits_for_one_layer_of_later_work_and_goes_before_the_rest():
    backbone = tiny.backbone("qwen3_vl")
    layers = len(backbone.decoder.layers)
    meeting = Meeting(backbone)
    for later_layers in meeting.go_on[1:]:
        later_layers.set()
    with ThreadPoolExecutor(1) as pool, at_layers(backbone, meeting.at_layer):
        working = pool.submit(meeting.work)
        assert meeting.reached[0].wait(LONG)
        with Account().count_now(backbone):
            meeting.go_on[0].set()
            for _ in range(2):
                meeting.plain()
        working.result(LONG)
    assert meeting.seen == ["later 0", *["call"] * 2 * layers, *(f"later {i}" for i in range(1, layers))]


def test_a_model_whose_forward_leaves_state_is_not_interrupted():
    backbone = tiny.backbone("longrope")
    assert not backbone.quiet
    layers = len(backbone.decoder.layers)
    meeting = Meeting(backbone)
    with ThreadPoolExecutor(1) as pool, at_layers(backbone, meeting.at_layer):
        working = pool.submit(meeting.work)
        assert meeting.reached[0].wait(LONG)
        with Account().count_now(backbone):
            for go_on in meeting.go_on:
                go_on.set()
            meeting.plain()
        working.result(LONG)
    assert meeting.seen == [*(f"later {i}" for i in range(layers)), *["call"] * layers]


def test_later_work_that_nobody_wants_ends_at_its_next_layer_and_the_model_is_free():
    backbone = tiny.backbone("qwen3_vl")
    over = threading.Event()
    meeting = Meeting(backbone, unwanted=over.is_set)
    with ThreadPoolExecutor(1) as pool, at_layers(backbone, meeting.at_layer):
        working = pool.submit(meeting.work)
        assert meeting.reached[0].wait(LONG)
        over.set()
        meeting.go_on[0].set()
        with pytest.raises(WorkCancelled):
            working.result(LONG)
    assert meeting.seen == ["later 0"]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(meeting.plain).result(LONG)  # the lock is nobody's


def test_who_waits_for_later_work_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(precedence, "PATIENCE", LONG)
    backbone = tiny.backbone("qwen3_vl")
    meeting = Meeting(backbone)
    for go_on in meeting.go_on:
        go_on.set()
    layers = len(backbone.decoder.layers)
    with (
        ThreadPoolExecutor(1) as pool,
        at_layers(backbone, meeting.at_layer),
        Account().count_now(backbone),
        calls_of(backbone).hurry(),
    ):
        pool.submit(meeting.work).result(LONG / 4)
    assert meeting.seen == [f"later {i}" for i in range(layers)]


def test_later_work_goes_on_when_a_call_takes_very_long(monkeypatch):
    monkeypatch.setattr(precedence, "PATIENCE", 0.01)
    backbone = tiny.backbone("qwen3_vl")
    meeting = Meeting(backbone)
    for go_on in meeting.go_on:
        go_on.set()
    layers = len(backbone.decoder.layers)
    with ThreadPoolExecutor(1) as pool, Account().count_now(backbone), at_layers(backbone, meeting.at_layer):
        pool.submit(meeting.work).result(LONG)
    assert meeting.seen == [f"later {i}" for i in range(layers)]


def test_who_holds_the_model_for_several_forwards_is_not_interrupted():
    backbone = tiny.backbone("qwen3_vl")
    meeting = Meeting(backbone)

    def held():
        with backbone.turns.alone():
            return meeting.work()

    layers = len(backbone.decoder.layers)
    with ThreadPoolExecutor(1) as pool, at_layers(backbone, meeting.at_layer):
        working = pool.submit(held)
        assert meeting.reached[0].wait(LONG)
        with Account().count_now(backbone):
            for go_on in meeting.go_on:
                go_on.set()
            meeting.plain()
        working.result(LONG)
    assert meeting.seen == [*(f"later {i}" for i in range(layers)), *["call"] * layers]


def test_the_hooks_are_no_part_of_the_computation():
    model = tiny.build("qwen3_vl")
    first = HfEngine(model)
    before = first.fingerprint
    again = HfEngine(model)  # more hooks on the same layers
    assert first.fingerprint == again.fingerprint == before
    for layer in model.get_submodule("model.language_model").layers:
        layer._forward_pre_hooks.clear()
    assert first.fingerprint == before


class SampledMeeting(Meeting):
    """A sample as later work: a few tokens of a chunk behind another one."""

    def _sampled(self):
        axes = self.backbone.axes
        tokens = self._span.num_tokens
        first, second = self._places, self._places + tokens
        kv = forwards.run(self.backbone, self._span, first)[0]
        completion = Design.of(token_kernel(kv, self.backbone.layout, first)).completion(2, second)
        live = self.backbone.live()
        live.show([Span(kv, None, (0,) * axes), Span(kv, None, (tokens,) * axes)])
        return lambda: self.backbone.sample([Sampling(self._span, second, 1, completion)], live)[0]

    def work(self):
        sample = self._sampled()
        self._worker = threading.get_ident()
        with count_as_later(self.backbone, (), self.unwanted):
            return sample()

    def plain(self):
        return self._sampled()()


class RowsMeeting(Meeting):
    """Rows of one forward as later work: a chunk twice, behind nothing."""

    def work(self):
        self._worker = threading.get_ident()
        with count_as_later(self.backbone, (), self.unwanted):
            return self.plain()

    def plain(self):
        return self.backbone.prefill([self._span] * 2, [self._places] * 2, apart=True)[1]


@pytest.mark.parametrize(
    "kind, family",
    [
        (SampledMeeting, "qwen2_5_vl"),
        (SampledMeeting, "deepseek_v3"),
        (SampledMeeting, "mistral_sliding"),
        (RowsMeeting, "qwen2_5_vl"),
        (RowsMeeting, "mistral_sliding"),
    ],
)
def test_a_call_may_come_between_the_layers_of_a_sample_and_of_rows(kind, family):
    backbone = tiny.backbone(family)
    chunk = samples.chunk(backbone, samples.sample(family, 3))
    meeting = kind(backbone)
    want, alone = meeting.plain(), call(backbone, chunk)
    with ThreadPoolExecutor(1) as pool, at_layers(backbone, meeting.at_layer):
        working = pool.submit(meeting.work)
        for reached, go_on in zip(meeting.reached, meeting.go_on, strict=True):
            assert reached.wait(LONG)
            with Account().count_now(backbone):
                go_on.set()
                got = call(backbone, chunk)
            assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))
        kv = working.result(LONG)
    assert all(torch.equal(x[n], y[n]) for x, y in zip(kv, want, strict=True) for n in y)
