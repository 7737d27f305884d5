"""Calls go before later work: order and KV of forwards that are interrupted between their layers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

from kamera.engines import Account, count_as_later, precedence
from kamera.engines.hf import HfEngine, forwards
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
