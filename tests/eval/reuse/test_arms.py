"""Arms against slow references: windows of the product, and prefills."""

from __future__ import annotations

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.eval.adapter import ArmQuestion, Unit
from kamera.eval.arms import arms_named
from kamera.eval.desk import Desk
from kamera.ops import kv_bytes


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def episode():
    return testbed.World(77).episode(0, layout="LLLI")


@pytest.fixture(scope="module")
def units(episode):
    return [Unit(f"u{i}", frame.content) for i, frame in enumerate(episode.frames)]


@pytest.fixture(scope="module")
def question(episode):
    bound = next(q for q in episode.questions if q.bound)
    return ArmQuestion(bound.text, (), 1)


@pytest.fixture(scope="module")
def desk(backbone):
    return Desk(backbone, testbed.SYSTEM)


def asked(desk, units, question, arm, *windows):
    """The answer behind windows of unit indices."""
    adapter = arms_named([arm])[arm](desk)
    for unit in units:
        adapter.encode(unit)
    if adapter.rehearsed:
        adapter.place([units[i].name for i in windows[-1]])
    for window in windows:
        adapter.place([units[i].name for i in window])
    return adapter.ask(question)


def window_logits(backbone, units, question, policy, order):
    """The product's own window over the same units, filled from a store that holds their canonicals."""
    window = KameraWindow(backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=policy)
    for unit in units:
        window.append(unit.content)
        window.evict(0)
    for index in order:
        window.append(units[index].content)
    return window.next_token_logits(question.text)


def test_the_reference_is_a_window_that_prefills(backbone, desk, units, question):
    answer = asked(desk, units, question, "reprefill", (0, 1, 2, 3))
    true = window_logits(backbone, units, question, ReusePolicy(minimum="exact", on_miss="prefill"), range(4))
    assert torch.allclose(answer.logits, true, atol=1e-4)
    tokens = [desk.encoded[unit.name].num_tokens for unit in units]
    assert (answer.window_tokens, answer.recomputed_tokens) == (sum(tokens), sum(tokens[1:]))
    assert (answer.forwards, answer.kept_bytes) == (3, 0)


def test_blind_is_a_window_of_relocated_canonicals(backbone, desk, units, question):
    policy = ReusePolicy(minimum="blind", on_miss="blind", forms="always")
    answer = asked(desk, units, question, "blind", (2, 0, 3))
    true = window_logits(backbone, units, question, policy, (2, 0, 3))
    assert torch.allclose(answer.logits, true, atol=1e-4)
    assert answer.recomputed_tokens == answer.forwards == 0
    assert answer.kept_bytes == sum(kv_bytes(desk.canonical(f"u{i}").kv) for i in (2, 0, 3))


def test_a_patch_of_full_rank_answers_as_exact_with_no_forward(desk, units, question):
    whole = asked(desk, units, question, "reprefill", (0, 1, 2, 3))
    answer = asked(desk, units, question, "patch@256", (3, 2, 1, 0), (0, 1, 2, 3))
    assert torch.allclose(answer.logits, whole.logits, atol=1e-3)
    assert answer.recomputed_tokens == answer.forwards == 0
