"""Readers: what is measured is the gradient of the answers, in the canonical frame, on every family."""

from __future__ import annotations

import pytest
import torch

from kamera.engines.hf import forwards
from kamera.ops import deficit, kv_concat, kv_copy, kv_of, relocate_kv, uniform_offset
from lab.readers import PATH, Reading, measure_readers
from lab.weighted import compress
from tests.models import samples
from tests.models.tiny import backbone

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "deepseek_vl", "kimi_k25", "glm4v"]
"""GQA with M-RoPE, deepstack, MHA, MLA, partial rotary."""

TOKENS = 3


def reading(name: str, questions: int = 1) -> Reading:
    """Three tokens of text behind eight, and questions behind both."""
    b = backbone(name)
    ids = [samples.text_ids(n, seed=n) for n in (8, TOKENS, 4)]
    first, here, after = b.positions(ids, [{}] * 3).split([8, TOKENS, 4], dim=1)
    alone = b.positions(ids[1:2], [{}])
    before, target = (b.encode(b.chunk_from_tensors(i)) for i in ids[:2])
    canonical, _ = forwards.run(b, target, alone)
    context, cache = forwards.run(b, before, first)
    context = kv_copy(context)
    conditioned, _ = forwards.run(b, target, here, cache)
    offset = uniform_offset(alone, here)
    asked = [samples.text_ids(4, seed=20 + i) for i in range(questions)]
    return Reading(
        context, canonical, deficit(conditioned, canonical, b.layout, offset), offset, asked, after
    )


def divergence(name: str, r: Reading, kv) -> float:
    """KL(served ‖ re-prefill) of the answer to the one question, by a plain forward."""
    b = backbone(name)

    def answer(kv):
        live = relocate_kv(kv, b.layout, r.offset)
        logits = forwards.forward(
            b, r.questions[0], r.positions, forwards.make_cache(b, [kv_concat([r.context, live])])
        )
        return logits.double().log_softmax(-1)

    said, truth = answer(kv), answer(on_the_way(r, 1.0))
    return float((said.exp() * (said - truth)).sum())


def on_the_way(r: Reading, share: float):
    return kv_of(
        [
            {
                name: t + share * delta[name].reshape(t.shape[1], t.shape[0], t.shape[2]).transpose(0, 1)
                for name, t in layer.items()
            }
            for layer, delta in zip(r.canonical, r.delta, strict=True)
        ],
        r.canonical.groups,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_moment_is_that_of_the_numerical_gradient(name):
    """With one question: the mean over the path of the outer product of its gradient, summed over tokens."""
    b, r = backbone(name), reading(name)
    readers = measure_readers(b, [r])
    readers.check(b.layout)
    layer, step = len(b.layout) - 1, 3e-3
    for channel in b.layout[layer].channels:
        moment = readers.layers[layer][channel.name][0]
        strongest = int(moment.diagonal().argmax())
        total = 0.0
        for share in PATH:
            for token in range(TOKENS):
                sides = []
                for sign in (1, -1):
                    kv = kv_copy(on_the_way(r, share))
                    kv[layer][channel.name][0, token, strongest] += sign * step
                    sides.append(divergence(name, r, kv))
                total += ((sides[0] - sides[1]) / (2 * step)) ** 2
        assert float(moment[strongest, strongest]) == pytest.approx(total / len(PATH), rel=0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_channel_has_symmetric_positive_moments(name):
    b = backbone(name)
    readers = measure_readers(b, [reading(name, 3)])
    for layer in readers.layers:
        for moment in layer.values():
            torch.testing.assert_close(moment, moment.mT)
            values = torch.linalg.eigvalsh(moment)
            assert float(values.min()) >= -1e-9 * float(values.max())
            assert float(values.max()) > 0


def test_equal_seeds_give_equal_readers_and_an_unchanged_model():
    b, r = backbone("qwen2_5_vl"), reading("qwen2_5_vl", 3)
    print_before = b.fingerprint
    one, two = (measure_readers(b, [r], seed=5) for _ in range(2))
    other = measure_readers(b, [r], seed=6)
    assert all(torch.equal(x[n], y[n]) for x, y in zip(one.layers, two.layers, strict=True) for n in x)
    assert not all(torch.equal(x[n], y[n]) for x, y in zip(one.layers, other.layers, strict=True) for n in x)
    assert b.fingerprint == print_before
    assert all(p.grad is None for p in b.model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_readers_of_a_family_weigh_its_patches(name):
    b, r = backbone(name), reading(name, 2)
    readers = measure_readers(b, [r])
    formed = compress(r.delta, b.layout, 4000, readers)
    assert 0 < formed.patch.nbytes <= 4000
    assert formed.energy > 0


def test_readings_without_questions_are_refused():
    b = backbone("qwen2_5_vl")
    with pytest.raises(ValueError, match="no readings"):
        measure_readers(b, [])
    with pytest.raises(ValueError, match="reading 0 has no questions"):
        measure_readers(b, [reading("qwen2_5_vl", 0)])
