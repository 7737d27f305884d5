"""Recomputing tokens of a reused chunk in context, held against plain forwards of the same model."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from kamera.content import Encoded
from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf.encode import decoder_arguments, with_batch
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, kv_concat, kv_copy, kv_map, kv_tokens, relocate_kv
from lab.attention import attention_mass
from lab.recompute import Resume, hidden_states, recompute
from tests.engines.compare import encoded, offset_between, positions, relative, text, worst
from tests.models.tiny import FAMILIES, LIMITED, build
from tests.models.tiny import backbone as tiny

BIDIRECTIONAL = ("gemma3", "gemma4_vl")
REFUSED = (*BIDIRECTIONAL, "unknown")
SERVED = tuple(f for f in (*FAMILIES, *LIMITED) if f not in REFUSED)
GQA, MHA, MLA, DEEPSTACK = "qwen2_5_vl", "deepseek_vl", "kimi_k25", "qwen3_vl"
MAIN = (GQA, MHA, MLA, DEEPSTACK)


class Case(NamedTuple):
    """A chunk behind another one, and every KV of it."""

    backbone: HfEngine
    span: Encoded
    home: torch.Tensor
    place: torch.Tensor
    context: KV
    blind: KV
    conditioned: KV

    def recompute(self, rows, **options):
        return recompute(
            self.backbone, self.span, self.place, self.context, self.blind, torch.tensor(rows), **options
        )

    @property
    def all_rows(self) -> list[int]:
        return list(range(self.span.num_tokens))


@functools.cache
def case(name: str) -> Case:
    return case_of(tiny(name), name)


def case_of(b: HfEngine, name: str) -> Case:
    before, span = encoded(b, name, seed=1), encoded(b, name, seed=2)
    (home,) = positions(b, span)
    first, place = positions(b, before, span)
    canonical, _ = forwards.run(b, span, home)
    context, cache = forwards.run(b, before, first)
    conditioned, _ = forwards.run(b, span, place, cache)
    blind = relocate_kv(canonical, b.layout, offset_between(home, place))
    return Case(b, span, home, place, context, blind, conditioned)


def rows_of(kv: KV, rows) -> KV:
    return kv_map(kv, lambda t: t[:, :, rows])


def bits(a: KV, b: KV) -> bool:
    return all(torch.equal(x[n], y[n]) for x, y in zip(a, b, strict=True) for n in x)


@pytest.mark.parametrize("name", SERVED)
def test_all_rows_equal_a_prefill_in_context(name):
    c = case(name)
    assert worst(c.blind, c.conditioned) > 1e-2  # or nothing would have had to be recomputed
    assert worst(c.recompute(c.all_rows).kv, c.conditioned) <= 1e-5


@pytest.mark.parametrize("name", SERVED)
def test_first_rows_equal_a_prefill_and_the_rest_stays_blind(name):
    c = case(name)
    made = c.recompute([0, 1, 2, 3, 4])
    assert worst(rows_of(made.kv, slice(0, 5)), rows_of(c.conditioned, slice(0, 5))) <= 1e-5
    assert bits(rows_of(made.kv, slice(5, None)), rows_of(c.blind, slice(5, None)))
    assert made.rows[-1].tolist() == [0, 1, 2, 3, 4] or not c.backbone.layout[-1].channels


@pytest.mark.parametrize("name", MAIN)
def test_no_rows_are_blind_reuse_without_a_forward(name):
    c = case(name)
    with c.backbone.measure() as work:
        made = c.recompute([])
    assert bits(made.kv, c.blind)
    assert work.forwards == 0


def appended(c: Case, rows: list[int]) -> KV:
    """The rows' KV by an ordinary append: reused tokens first, the rows behind them, a mask for order.

    Attention does not care in which order a cache lies, so this is the same computation.
    """
    b, before = c.backbone, kv_tokens(c.context)
    reused = [i for i in c.all_rows if i not in rows]
    cache = forwards.make_cache(b, [kv_concat([c.context, rows_of(c.blind, reused)])])
    place_of = torch.tensor([*range(before), *(before + i for i in (*reused, *rows))])
    asking = before + torch.tensor(rows)
    seen = place_of[None] <= asking[:, None]
    window = getattr(b.config, "sliding_window", None)
    if window is not None:
        seen &= place_of[None] > asking[:, None] - window
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    tensors = {}
    pictured = c.span.tensors.get("visual_pos_masks")
    for name, tensor in c.span.tensors.items():
        if name.startswith("deepstack"):
            index = pictured[0].nonzero()[:, 0].tolist()
            tensors[name] = torch.stack([tensor[index.index(r)] for r in rows if r in index])
        else:
            tensors[name] = tensor[:, rows]
    arguments = decoder_arguments(Encoded(c.span.input_ids[rows], {}, tensors), b.model.device)
    with torch.no_grad():
        b.decoder(
            **arguments,
            attention_mask=mask[None, None],
            position_ids=with_batch(c.place[:, rows]),
            past_key_values=cache,
            use_cache=True,
        )
    total = before + c.span.num_tokens
    return tuple(
        {ch.name: getattr(layer, ch.tensor)[0][:, total - len(rows) :] for ch in spec.channels}
        for layer, spec in zip(cache.layers, b.layout, strict=True)
    )


@pytest.mark.parametrize("name", [*MAIN, "glm4v", "ernie", "deepseek_v2", "llava", "mistral_sliding"])
def test_scattered_rows_equal_an_append_under_a_mask(name):
    c = case(name)
    rows = [1, 4, 5, c.span.num_tokens - 1]
    made = c.recompute(rows)
    assert worst(rows_of(made.kv, rows), appended(c, rows)) <= 1e-5
    # not what a prefill gives: the reused rows between them are stale
    assert worst(rows_of(made.kv, rows), rows_of(c.conditioned, rows)) > 1e-4


def test_rows_may_be_unsorted_and_repeated():
    c = case(GQA)
    assert bits(c.recompute([7, 2, 2, 5]).kv, c.recompute([2, 5, 7]).kv)


@pytest.mark.parametrize("name", MAIN)
def test_inputs_are_left_as_they_were(name):
    c = case(name)
    before = [kv_copy(kv) for kv in (c.context, c.blind)]
    c.recompute(c.all_rows)
    recompute(c.backbone, c.span, c.home, forwards.allocate_kv(c.backbone, 0), c.blind, torch.tensor([0, 1]))
    assert bits(before[0], c.context)
    assert bits(before[1], c.blind)


# -- narrowing from layer to layer -----------------------------------------------------------------


@pytest.mark.parametrize("name", MAIN)
def test_keep_sees_all_rows_and_dropped_rows_stay_blind(name):
    c = case(name)
    asked: list[tuple[int, list[int]]] = []

    def keep(layer, rows, fresh, held):
        asked.append((layer, rows.tolist()))
        for n in held:
            assert torch.equal(held[n], c.blind[layer][n][:, rows])
        if layer == 1:  # its input is exact as long as every row is there
            assert max(relative(fresh[n], c.conditioned[1][n][:, rows]) for n in fresh) <= 1e-5
        return rows[layer * 2 :]

    made = c.recompute(c.all_rows, keep=keep)
    rest = c.all_rows
    for layer, (where, rows) in enumerate(asked):
        assert (where, rows) == (layer, rest)
        rest = rest[layer * 2 :]
        assert made.rows[layer].tolist() == rest
        dropped = [i for i in c.all_rows if i not in rest]
        assert all(
            torch.equal(made.kv[layer][n][:, dropped], t[:, dropped]) for n, t in c.blind[layer].items()
        )
    assert len(asked) == len(c.backbone.layout)


def test_dropped_rows_reach_nothing_deeper():
    # dropped at layer 1, tokens 0 and 1 are blind to the rest: as if only the rest had run from there
    c = case(GQA)
    made = c.recompute(c.all_rows, keep=lambda layer, rows, fresh, held: rows[rows >= 2] if layer else rows)
    entry = hidden_states(c.backbone, c.span, c.place, c.context, 1)
    want = c.recompute(c.all_rows[2:], resume=Resume(1, entry))
    assert worst(made.kv, want.kv) <= 1e-5
    assert worst(made.kv[2:], c.conditioned[2:]) > 1e-4


def test_keep_must_choose_among_the_rows_that_run():
    c = case(GQA)
    with pytest.raises(ValueError, match=r"keep gave rows \[0, 3\] at layer 0: \[2, 3\] run there"):
        c.recompute([2, 3], keep=lambda layer, rows, fresh, held: torch.tensor([0, 3]))


# -- entering at a deeper layer --------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MAIN, "mistral_sliding", "gemma4"])
def test_resuming_at_the_first_layer_is_a_prefill(name):
    c = case(name)
    entry = hidden_states(c.backbone, c.span, c.home, forwards.allocate_kv(c.backbone, 0), 0)
    assert worst(c.recompute(c.all_rows, resume=Resume(0, entry)).kv, c.conditioned) <= 1e-5


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("layer", [1, 2])
def test_resuming_with_conditioned_states_equals_a_prefill(name, layer):
    c = case(name)
    entry = hidden_states(c.backbone, c.span, c.place, c.context, layer)
    made = c.recompute(c.all_rows, resume=Resume(layer, entry))
    assert worst(made.kv[layer:], c.conditioned[layer:]) <= 1e-5
    assert bits(made.kv[:layer], c.blind[:layer])


@pytest.mark.parametrize("name", MAIN)
def test_resuming_with_canonical_states_changes_later_layers(name):
    c = case(name)
    made = c.recompute(
        c.all_rows,
        resume=Resume(1, hidden_states(c.backbone, c.span, c.home, forwards.allocate_kv(c.backbone, 0), 1)),
    )
    assert worst(made.kv[:2], c.blind[:2]) <= 1e-5  # same input, moved: the keys only turn
    assert worst(made.kv[2:], c.blind[2:]) > 1e-2


def test_resuming_equals_running_the_deep_layers_by_hand():
    c = case("llava")
    b, n, before = c.backbone, c.span.num_tokens, kv_tokens(c.context)
    hidden = hidden_states(b, c.span, c.home, forwards.allocate_kv(b, 0), 1)
    made = c.recompute(c.all_rows, resume=Resume(1, hidden))
    cache, x = forwards.make_cache(b, [c.context]), hidden[None]
    mask = torch.full((n, before + n), torch.finfo(torch.float32).min).triu(before + 1)[None, None]
    with torch.no_grad():
        tables = b.decoder.rotary_emb(x, c.place)
        for layer in b.decoder.layers[1:]:
            x = layer(
                x,
                attention_mask=mask,
                position_ids=c.place,
                past_key_values=cache,
                position_embeddings=tables,
                use_cache=True,
            )
    for i in (1, 2):
        assert relative(made.kv[i]["k"], cache.layers[i].keys[0, :, before:]) <= 1e-5
        assert relative(made.kv[i]["v"], cache.layers[i].values[0, :, before:]) <= 1e-5


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_bidirectional_pictures_are_refused_and_text_is_not(name):
    c = case(name)
    with pytest.raises(UnsupportedBackbone, match="lets the tokens of a picture see each other"):
        c.recompute([0])
    b, span = c.backbone, text(6, seed=3)
    (place,) = positions(b, span)
    whole, _ = forwards.run(b, span, place)
    made = recompute(b, span, place, forwards.allocate_kv(b, 0), whole, torch.tensor([1, 2]))
    assert worst(made.kv, whole) <= 5e-5


def test_attention_without_an_additive_mask_is_refused():
    with pytest.raises(UnsupportedBackbone, match="attends with None, which takes no additive mask"):
        case("unknown").recompute([0])


def test_an_encoding_without_a_token_axis_is_refused():
    c = case(GQA)
    odd = Encoded(c.span.input_ids, {}, {**c.span.tensors, "summary": torch.zeros(3)})
    with pytest.raises(UnsupportedBackbone, match=r"takes summary of shape \(3,\)"):
        c._replace(span=odd).recompute([0])


@pytest.mark.parametrize("rows", [[-1], [0, 12]])
def test_rows_outside_the_chunk_are_refused(rows):
    with pytest.raises(ValueError, match="outside a chunk of 12 tokens"):
        case(GQA).recompute(rows)


def test_a_layer_outside_the_model_is_refused():
    c = case(GQA)
    with pytest.raises(ValueError, match="layer 3 is outside a model of 3"):
        c.recompute([0], resume=Resume(3, torch.zeros(12, 64)))


@pytest.mark.parametrize("name", ["mistral_sliding", GQA])
def test_a_failed_forward_leaves_no_hook_behind(name):
    c = case_of(HfEngine(build(name)), name)
    layers = c.backbone.decoder.layers
    before = [list(layer._forward_pre_hooks) for layer in layers]
    with pytest.raises(RuntimeError):
        c.recompute(c.all_rows, resume=Resume(1, torch.zeros(c.span.num_tokens, 7)))
    assert [list(layer._forward_pre_hooks) for layer in layers] == before


# -- what a question looks at ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MAIN)
def test_attention_mass_is_that_of_eager_attention(name):
    c = case(name)
    asked = text(5, seed=9)
    place = c.place.max() + 1 + torch.arange(5).expand(c.backbone.axes, -1)
    held = kv_concat([c.context, c.conditioned])
    masses = attention_mass(c.backbone, asked.input_ids, place, forwards.make_cache(c.backbone, [held]))
    eager = build(name)
    eager.set_attn_implementation("eager")
    out = eager(
        input_ids=asked.input_ids[None],
        position_ids=with_batch(place),
        past_key_values=forwards.make_cache(c.backbone, [held]),
        output_attentions=True,
    )
    for mass, weights in zip(masses, out.attentions, strict=True):
        want = weights[0, :, :, : kv_tokens(held)].sum((0, 1))
        assert relative(mass, want) <= 1e-5


def test_attention_mass_leaves_the_model_as_it_was():
    c = case(GQA)
    before = c.backbone.decoder.config._attn_implementation, c.backbone.fingerprint
    place = c.place.max() + 1 + torch.arange(2).expand(c.backbone.axes, -1)
    attention_mass(
        c.backbone, text(2).input_ids, place, forwards.make_cache(c.backbone, [c.context, c.blind])
    )
    assert (c.backbone.decoder.config._attn_implementation, c.backbone.fingerprint) == before
    assert not any(layer.self_attn._forward_hooks for layer in c.backbone.decoder.layers)


def test_attention_mass_is_refused_if_attention_is_hidden():
    c = case("unknown")
    with pytest.raises(UnsupportedBackbone, match="no self_attn to watch"):
        attention_mass(
            c.backbone,
            text(2).input_ids,
            torch.arange(2)[None] + 30,
            forwards.make_cache(c.backbone, [c.blind]),
        )
