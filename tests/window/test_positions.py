"""Where slots stand: moved many times, in a frame, and near the model's limit."""

from __future__ import annotations

import pytest
import torch

from kamera import ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.ops import kv_copy, kv_map, uniform_offset
from kamera.ops.kernels import serve
from kamera.window import plan, sequence_of
from tests.models import samples, tiny
from tests.window.rig import (
    Snapshot,
    frame,
    live,
    make,
    rig,
    same_bits,
)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_slides_equal_one_move_bit_for_bit(family, dtype, monkeypatch):
    monkeypatch.setattr(plan, "DRIFT", 0)  # so that every slide turns every survivor
    backbone = tiny.backbone(family, dtype)
    chunks = [
        samples.chunk(backbone, samples.sample(family, 9)),
        *(backbone.chunk_from_tensors(samples.text_ids(3, seed)) for seed in range(8)),
        samples.chunk(backbone, samples.sample(family, 10)),
    ]
    window = make(backbone, None, *chunks, policy=ReusePolicy(max_departed=1.0))
    original = kv_copy(live(window, 9))
    stood = sequence_of(window).position_ids[:, -chunks[-1].num_tokens :]
    for _ in range(8):  # one stays in front: what leads is served from its canonical
        window.slide()
    _, slot = window.slots
    assert slot.guarantee == "survivor"
    offset = uniform_offset(stood, sequence_of(window).position_ids[:, slot.start :])
    assert any(offset)
    once = kv_map(original, torch.empty_like)
    serve(once, original, None, backbone.layout, offset)
    assert same_bits(live(window, 1), once)


def test_a_frame_never_brings_a_question_to_the_last_position():
    backbone = HfEngine(drifting(60))
    chunks = [backbone.chunk_from_tensors(samples.text_ids(9, seed)) for seed in range(8)]
    window = make(backbone, None, *chunks[:2], max_tokens=4 + 2 * 9)
    for chunk in chunks[2:7]:
        window.append(chunk)
        # 22 positions and their frame leave half of the 60 to question and answer
        assert frame(window)[0] + 21 <= 30
        assert int(sequence_of(window).position_ids.max()) == 21


def drifting(limit: int):
    """A LLaVA whose positions end at ``limit``."""
    model = tiny.build("llava")
    model.config.get_text_config().max_position_embeddings = limit
    return model


def test_slots_say_where_they_start_in_the_sequence():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks)
    for slot, chunk in zip(window.slots, chunks, strict=True):
        assert torch.equal(
            sequence_of(window).input_ids[slot.start : slot.start + slot.length], chunk.input_ids
        )
        assert slot.position == int(sequence_of(window).position_ids[0, slot.start])
        assert (slot.chunk_id, slot.label) == (chunk.id, chunk.label)
    assert Snapshot.of(window).matches(window)
