"""Where slots stand: moved many times, in a frame, and near the model's limit."""

from __future__ import annotations

import pytest
import torch

from kamera.engines.hf import HfEngine
from kamera.ops import kv_copy, kv_map, uniform_offset
from kamera.ops.kernels import serve
from kamera.patches.chunks import compact_positions
from kamera.window import former_of, seating, sequence_of
from kamera.window.seats import Seats
from kamera.window.state import WindowState
from tests.engines.compare import relative, worst
from tests.models import samples, tiny
from tests.window.rig import (
    QUESTION,
    Snapshot,
    addresses,
    chunks_of,
    live,
    make,
    rig,
    rope_index,
    same_bits,
)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_slides_equal_one_move_bit_for_bit(family, dtype, monkeypatch):
    monkeypatch.setattr(seating, "DRIFT", 0)  # so that every slide turns every survivor
    backbone = tiny.backbone(family, dtype)
    chunks = [
        samples.chunk(backbone, samples.sample(family, 9)),
        *(backbone.chunk_from_tensors(samples.text_ids(3, seed)) for seed in range(8)),
        samples.chunk(backbone, samples.sample(family, 10)),
    ]
    window = make(backbone, None, *chunks)
    original = kv_copy(live(window, 9))
    stood = sequence_of(window).position_ids[:, -chunks[-1].num_tokens :]
    for _ in range(9):
        window.slide()
    (slot,) = window.slots
    assert slot.guarantee == "survivor"
    offset = uniform_offset(stood, sequence_of(window).position_ids[:, slot.start :])
    assert any(offset)
    once = kv_map(original, torch.empty_like)
    serve(once, original, None, backbone.layout, offset)
    assert same_bits(live(window, 0), once)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25", "deepseek_v32"])
def test_a_slide_moves_the_anchor_instead_of_the_survivors(family):
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks)
    stood = [addresses(window, i) for i in range(4)]
    turned = make(backbone, None, *chunks)
    for gone in (1, 2, 3):
        report = window.slide()
        assert [addresses(window, i) for i in range(len(window))] == stood[gone:]
        assert report.bytes_rotated == 4 * phased_bytes(backbone)
        assert torch.equal(sequence_of(window).position_ids, rope_index(backbone, chunks_of(window, chunks)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seating, "DRIFT", 0)
        report = turned.slide(3)
        assert report.bytes_rotated >= turned.slots[0].length * phased_bytes(backbone)
    assert worst(live(window, 0), live(turned, 0)) <= 1e-5
    logits = [w.next_token_logits(QUESTION) for w in (window, turned)]
    assert relative(*logits) <= 1e-5
    assert window._state.seats.frame != turned._state.seats.frame == (0,) * backbone.axes


def phased_bytes(backbone) -> int:
    """Bytes of a token's channels that carry a phase."""
    size = backbone.facts.bytes_per_token // sum(
        c.features for spec in backbone.layout for c in spec.channels
    )
    return size * sum(c.features for spec in backbone.layout for c in spec.channels if c.rope is not None)


def test_endless_slides_return_keys_to_their_positions(monkeypatch):
    """A frame never drifts out of bounds, and no answer tells where it stands."""
    monkeypatch.setattr(seating, "DRIFT", 40)
    backbone = tiny.backbone("llava")
    chunks = [backbone.chunk_from_tensors(samples.text_ids(9, seed)) for seed in range(14)]
    window = make(backbone, None, *chunks[:3], max_tokens=4 + 3 * 9)
    frames, turned = [], []
    for chunk in chunks[3:]:
        report = window.append(chunk)
        frames.append(window._state.seats.frame[0])
        turned.append(report.bytes_rotated > 4 * phased_bytes(backbone))
        again = window.fork()
        state, standing = window._state, window._stage.spots
        spots = standing.compact(state.facts)
        home = [seat.at(spot) for seat, spot in zip(state.seats.seats, spots, strict=True)]
        again._state = WindowState(Seats.home(home, 1), state.tensors)
        assert relative(window.next_token_logits(QUESTION), again.next_token_logits(QUESTION)) <= 1e-5
        del again  # which shares the room
    assert frames == [9, 18, 27, 36, 0, 9, 18, 27, 36, 0, 9]
    assert turned == [f == 0 for f in frames]


def compact(window):
    return compact_positions(
        former_of(window).backbone, former_of(window).anchor.input_ids, window._state.facts
    )


def test_a_frame_never_brings_a_question_to_the_last_position():
    backbone = HfEngine(drifting(60))
    chunks = [backbone.chunk_from_tensors(samples.text_ids(9, seed)) for seed in range(8)]
    window = make(backbone, None, *chunks[:2], max_tokens=4 + 2 * 9)
    for chunk in chunks[2:7]:
        window.append(chunk)
        # 22 positions and their frame leave half of the 60 to question and answer
        assert window._state.seats.frame[0] + 21 <= 30
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
