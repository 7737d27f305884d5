"""The family matrix: what Kamera promises, held for every supported model with real pixels."""

from __future__ import annotations

import pytest
import torch

from kamera.content import Encoded
from kamera.engines.hf import forwards
from kamera.ops import apply_patch, form_patch, kv_slice, relocate_kv, uniform_offset
from tests.engines.compare import (
    encoded,
    offset_between,
    positions,
    relative,
    shifted,
    text,
    worst,
)
from tests.models import samples
from tests.models.tiny import FAMILIES, LIMITED, MROPE, backbone

SERVED = (*FAMILIES, *LIMITED)
NEAR = (100,)  # below the limit of the limited families
OFFSETS = {"uniform": (1000, 1000, 1000), "t_only": (1000, 0, 0), "per_axis": (500, 7, -11)}


def moves() -> list:
    """Every family by every kind of move its positions can make."""
    cases = [(name, kind) for name in SERVED for kind in (OFFSETS if name in MROPE else ("uniform",))]
    return [pytest.param(name, kind, id=f"{name}-{kind}") for name, kind in cases]


def move(name: str, kind: str) -> tuple[int, ...]:
    return NEAR if name in LIMITED else OFFSETS[kind][: backbone(name).axes]


def bound(name: str) -> float:
    # Gemma 4 normalises values without a scale: its float32 floor is higher (facts, section 3)
    return 5e-5 if name.startswith("gemma4") else 1e-5


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "kind"), moves())
def test_relocation_equals_prefill_at_the_new_position(name, kind):
    b, offset = backbone(name), move(name, kind)
    span = encoded(b, name)
    (home,) = positions(b, span)
    here, _ = forwards.run(b, span, home)
    there, _ = forwards.run(b, span, shifted(home, offset))
    assert worst(relocate_kv(here, b.layout, offset), there) <= bound(name)
    assert worst(here, there) > 1e-2  # or nothing would have had to move


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SERVED)
def test_relocation_in_bfloat16_rounds_once_in_the_first_layer(name):
    b = backbone(name, torch.bfloat16)
    offset = NEAR if name in LIMITED else OFFSETS["per_axis"][: b.axes]
    span = encoded(b, name)
    (home,) = positions(b, span)
    here, _ = forwards.run(b, span, home)
    there, _ = forwards.run(b, span, shifted(home, offset))
    assert {t.dtype for layer in here for t in layer.values()} == {torch.bfloat16}
    assert worst(relocate_kv(here, b.layout, offset), there, layers=[0]) <= 1e-2


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SERVED)
def test_a_full_patch_equals_the_conditioned_prefill_anywhere(name):
    b = backbone(name)
    before, span = encoded(b, name, seed=1), encoded(b, name, seed=2)
    (alone,) = positions(b, span)
    first, second = positions(b, before, span)
    canonical, _ = forwards.run(b, span, alone)
    _, cache = forwards.run(b, before, first)
    conditioned, _ = forwards.run(b, span, second, cache)
    there = offset_between(alone, second)
    patch = form_patch(conditioned, canonical, b.layout, there).patch
    blind = relocate_kv(canonical, b.layout, there)
    assert worst(blind, conditioned) > 1e-2  # or there would be nothing to absorb
    onward = move(name, "per_axis")
    _, cache = forwards.run(b, before, shifted(first, onward))
    expected, _ = forwards.run(b, span, shifted(second, onward), cache)
    for step, want in (((0,) * b.axes, conditioned), (onward, expected)):
        place = tuple(x + y for x, y in zip(there, step, strict=True))
        assert worst(apply_patch(canonical, patch, b.layout, place), want) <= bound(name)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", SERVED)
def test_encode_then_prefill_equals_the_plain_model(name):
    """Stopping the model at its decoder's door changes nothing: KV, positions and logits."""
    b = backbone(name)
    chunks = [samples.chunk(b, samples.sample(name, seed)) for seed in (1, 2)]
    chunks.append(b.chunk_from_tensors(samples.text_ids(5, seed=3)))
    ids, inputs = samples.join(chunks)
    seen = {}
    hook = b.decoder.register_forward_pre_hook(lambda m, a, kw: seen.update(kw), with_kwargs=True)
    try:
        with torch.no_grad():
            out = b.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **inputs)
    finally:
        hook.remove()

    spans = [b.encode(c) for c in chunks]
    places = positions(b, *spans)
    given = seen.get("position_ids")
    given = torch.arange(ids.shape[1])[None] if given is None else given.reshape(-1, ids.shape[1])[-b.axes :]
    assert torch.equal(torch.cat(places, 1), given)

    cache = None
    for span, place in zip(spans[:2], places[:2], strict=True):
        _, cache = forwards.run(b, span, place, cache)
    logits = forwards.forward(b, chunks[2].input_ids, places[2], cache)
    assert relative(logits, out.logits[0, -1]) <= 1e-4
    for mine, theirs in zip(cache.layers, out.past_key_values.layers, strict=True):
        for tensor in ("keys", "values", "indexer_keys"):
            want = getattr(theirs, tensor, None)
            if want is not None:  # sliding layers of the model's own cache hold a tail
                got = getattr(mine, tensor)
                axis = 1 if tensor == "indexer_keys" else 2
                tail = got.narrow(axis, got.shape[axis] - want.shape[axis], want.shape[axis])
                assert relative(tail, want) <= bound(name)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "ernie"])
def test_positions_equal_get_rope_index(name):
    b = backbone(name)
    chunks = [samples.chunk(b, samples.sample(name, seed)) for seed in (1, 2)]
    if name in ("qwen2_5_vl", "qwen3_vl"):
        chunks.insert(1, samples.chunk(b, samples.video_sample(name, seconds=1.5)))
    ids, inputs = samples.join(chunks)
    wanted = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    want, _ = b.model.model.get_rope_index(ids, **{k: v for k, v in inputs.items() if k in wanted})
    got = b.positions([c.input_ids for c in chunks], [c.position_inputs() for c in chunks])
    assert torch.equal(got, want[:, 0])
    assert got.shape[0] == 3
    assert not torch.equal(got[0], got[1])


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_5_vl", "qwen3_vl", "glm4v", "ernie", "deepseek_vl", "llava", "llama_mqa"),
        *("kimi_k25", "deepseek_v2"),
    ],
)
def test_a_moved_canonical_equals_the_block_masked_model(name):
    """KV(B|anchor), relocated behind A, is what the model computes where B sees its anchor and not A.

    The anchor B sees moves along with it: a canonical keeps its distance to the anchor it was made behind.
    """
    b = backbone(name)
    anchor = b.chunk_from_tensors(samples.text_ids(5, seed=9))
    one, two = (samples.chunk(b, samples.sample(name, seed)) for seed in (1, 2))
    chunks = [one, anchor, two]
    before, opening, span = (b.encode(c) for c in chunks)
    at_anchor, home = positions(b, opening, span)
    first, *_, there = positions(b, before, opening, span)
    offset = uniform_offset(home, there)
    _, cache = forwards.run(b, opening, at_anchor)
    canonical, _ = forwards.run(b, span, home, cache)

    ids, inputs = samples.join(chunks)
    total, behind = ids.shape[1], before.num_tokens
    blocked = torch.full((total, total), float("-inf")).triu(1)
    blocked[behind:, :behind] = float("-inf")
    place = torch.cat((first, shifted(at_anchor, offset), there), 1)
    with torch.no_grad():
        out = b.model(
            input_ids=ids,
            attention_mask=blocked[None, None],
            position_ids=place[:, None] if b.axes == 3 else place,
            use_cache=True,
            **inputs,
        )
    want = [
        {c.name: getattr(layer, c.tensor)[0][:, -span.num_tokens :] for c in spec.channels}
        for layer, spec in zip(out.past_key_values.layers, b.layout, strict=True)
    ]
    assert worst(relocate_kv(canonical, b.layout, offset), want) <= 1e-5


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni", "qwen2_vl"])
@pytest.mark.parametrize("seconds", [0.5, 0.7, 1.0, 1.5])
def test_a_whole_clip_on_the_clock_relocates(name, seconds):
    b = backbone(name)
    span = b.encode(samples.chunk(b, samples.video_sample(name, seconds=seconds)))
    (home,) = positions(b, span)
    _, there = positions(b, text(31), span)
    offset = uniform_offset(home, there)
    assert offset == (31, 31, 31)
    here, _ = forwards.run(b, span, home)
    want, _ = forwards.run(b, span, there)
    assert worst(relocate_kv(here, b.layout, offset), want) <= 1e-5


@pytest.mark.parametrize(("seconds", "uniform"), [(1.0, True), (1.5, True), (0.7, False)])
def test_a_cut_clip_moves_only_if_its_floored_times_do(seconds, uniform):
    b = backbone("qwen2_5_vl")
    long, short = (
        b.encode(samples.chunk(b, samples.video_sample("qwen2_5_vl", seconds=seconds, steps=n)))
        for n in (6, 4)
    )
    (in_long,), (alone,) = positions(b, long), positions(b, short)
    cut = slice(3 + 4 * 1, 3 + 4 * 5)  # temporal steps 1 to 4 of 6
    offset = uniform_offset(alone[:, 3 : 3 + 16], in_long[:, cut])
    assert (offset is not None) == uniform


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_shared", "gemma4_vl", "mistral_sliding"])
def test_sliding_layers_keep_every_token(name):
    b = backbone(name)
    long = text(30, seed=4)  # the window of these models is 8
    (place,) = positions(b, long)
    kv, _ = forwards.run(b, long, place)
    assert {t.shape[1] for layer in kv for t in layer.values()} == {30}
    again = forwards.make_cache(b, [kv_slice(kv, 0, 19)])
    rest = Encoded(long.input_ids[19:])
    tail, _ = forwards.run(b, rest, place[:, 19:], again)
    assert worst(tail, [{n: t[:, 19:] for n, t in layer.items()} for layer in kv]) <= bound(name)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_vl"])
def test_pictures_attend_both_ways_from_stored_embeddings_too(name):
    """A backbone that never encoded a picture itself masks one as the model does."""
    from kamera.engines.hf import HfEngine
    from tests.models.tiny import build

    b = backbone(name)
    span = encoded(b, name)
    (place,) = positions(b, span)
    want, _ = forwards.run(b, span, place)
    got, _ = forwards.run(HfEngine(build(name)), span, place)
    assert worst(got, want) == 0
    blind = Encoded(span.input_ids, {}, span.tensors)
    causal, _ = forwards.run(b, blind, place)
    assert worst(causal, want) > 1e-2
