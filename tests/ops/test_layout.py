"""Layouts: which channel of a layer moves, and what KV fits them."""

from __future__ import annotations

import pytest
import torch

from kamera.ops import (
    LayerLayout,
    RopeSpec,
    attention_layout,
    check_kv,
    kv_bytes,
    kv_concat,
    kv_of,
    kv_slice,
    kv_tokens,
    layer_groups,
    mla_expanded_layout,
    mla_latent_layout,
    relocate,
    relocate_kv,
    rotated_bytes,
)

ROPE = RopeSpec((1.0, 0.25, 0.05, 0.01), (0,) * 4, 1, "half")
INTERLEAVED = RopeSpec((1.0, 0.25, 0.05, 0.01), (0,) * 4, 1, "interleaved")
LAYOUTS = {
    "gqa": attention_layout(2, 4, 12, 10, ROPE),
    "mla": mla_latent_layout(24, INTERLEAVED),
    "dsa": mla_latent_layout(24, INTERLEAVED, (1, 16, ROPE)),
    "mla_expanded": mla_expanded_layout(4, 16, 12, ROPE),
    "none": LayerLayout("NONE", ()),
}


def span(*layouts: LayerLayout, tokens: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    layers = [
        {c.name: torch.randn(c.heads, tokens, c.dim, generator=generator).to(dtype) for c in layout.channels}
        for layout in layouts
    ]
    return kv_of(layers, layer_groups(layouts))


@pytest.mark.parametrize(
    ("name", "free", "phased"),
    [
        ("gqa", {"v": "values"}, {"k": "keys"}),
        ("mla", {"c_kv": "keys"}, {"k_pe": "values"}),
        ("dsa", {"c_kv": "keys"}, {"k_pe": "values", "k_idx": "indexer_keys"}),
        ("mla_expanded", {"v": "values"}, {"k": "keys"}),
        ("none", {}, {}),
    ],
)
def test_only_the_phased_channels_of_a_layer_turn(name, free, phased):
    layout = LAYOUTS[name]
    assert {c.name: c.tensor for c in layout.channels if c.rope is None} == free
    assert {c.name: c.tensor for c in layout.channels if c.rope is not None} == phased
    kv = span(layout)
    (moved,) = relocate_kv(kv, [layout], (7,))
    for channel in free:
        assert moved[channel].data_ptr() == kv[0][channel].data_ptr()
    for channel in phased:
        assert not torch.equal(moved[channel], kv[0][channel])
    assert rotated_bytes(kv, [layout]) == sum(kv[0][c].numel() * 4 for c in phased)


def test_expanded_mla_turns_only_what_lies_past_the_nope_part():
    layout = LAYOUTS["mla_expanded"]
    kv = span(layout)
    (moved,) = relocate_kv(kv, [layout], (7,))
    assert torch.equal(moved["k"][..., :16], kv[0]["k"][..., :16])
    assert torch.equal(moved["k"][..., 16:], relocate(kv[0]["k"][..., 16:], ROPE, (7,)))


def test_layers_turn_by_their_own_frequencies():
    fast = attention_layout(2, 4, 8, 8, ROPE)
    slow = attention_layout(2, 4, 8, 8, RopeSpec((0.1,) * 4, (0,) * 4, 1, "half"))
    one = span(fast)[0]
    moved = relocate_kv(kv_of((one, one), layer_groups((fast, slow))), (fast, slow), (3,))
    assert torch.equal(moved[0]["k"], relocate(one["k"], ROPE, (3,)))
    assert not torch.equal(moved[0]["k"], moved[1]["k"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda kv: kv[:1], "1 layers does not fit a layout of 2"),
        (lambda kv: ({"k": kv[0]["k"]}, kv[1]), r"layer 0 has channels \['k'\]"),
        (lambda kv: (kv[0], {**kv[1], "x": kv[1]["k"]}), "layer 1 has channels"),
        (lambda kv: (kv[0], {**kv[1], "v": kv[1]["v"][:, :4]}), r"layer 1 channel v: shape \(2, 4, 10\)"),
        (lambda kv: ({**kv[0], "k": kv[0]["k"][:1]}, kv[1]), "layer 0 channel k"),
        (lambda kv: ({**kv[0], "k": kv[0]["k"][..., :11]}, kv[1]), "layer 0 channel k"),
        (lambda kv: ({**kv[0], "k": kv[0]["k"][None]}, kv[1]), "layer 0 channel k"),
    ],
)
def test_kv_of_another_layout_is_refused_by_layer_and_channel(spoil, message):
    layout = [LAYOUTS["gqa"]] * 2
    kv = span(*layout)
    check_kv(kv, layout)
    for function in (lambda k: check_kv(k, layout), lambda k: relocate_kv(k, layout, (1,))):
        with pytest.raises(ValueError, match=message):
            function(kv_of(spoil(kv)))


def test_spans_join_and_cut_along_tokens():
    layout = [LAYOUTS["none"], LAYOUTS["dsa"], LAYOUTS["gqa"]]
    a, b = span(*layout, tokens=3), span(*layout, tokens=4, seed=1)
    joined = kv_concat((a, b))
    assert kv_tokens(joined) == 7
    assert kv_bytes(joined) == kv_bytes(a) + kv_bytes(b) == 7 * 4 * (24 + 8 + 16 + 2 * 12 + 2 * 10)
    for got, want in ((kv_slice(joined, 0, 3), a), (kv_slice(joined, 3, 7), b)):
        for mine, theirs in zip(got, want, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[n], theirs[n]) for n in mine)
