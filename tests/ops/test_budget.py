"""How large a patch may be: plain where that fits, the bytes well spent where it does not."""

import pytest
import torch

from kamera.ops import (
    Channel,
    LayerLayout,
    Patch,
    PatchBudget,
    compress,
    deficit,
    kv_bytes,
    kv_map,
    kv_of,
    layers_of,
    patch_of,
)
from kamera.ops.budget import SMALL

TOKENS, FEATURES, LAYERS = 320, 64, 4


def _layout():
    return tuple(
        LayerLayout("GQA", (Channel("k", "keys", 2, FEATURES // 2), Channel("v", "values", 2, FEATURES // 2)))
        for _ in range(LAYERS)
    )


def scene(dtype=torch.float32, seed: int = 0, tokens: int = TOKENS):
    """A canonical, and deficits whose energy lies in a few directions of a few layers."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    canonical = kv_of([{n: draw(2, tokens, FEATURES // 2).to(dtype) for n in "kv"} for _ in range(LAYERS)])
    fall = 0.8 ** torch.arange(FEATURES)
    deltas = kv_of(
        [
            {n: (draw(tokens, FEATURES) * fall) @ draw(FEATURES, FEATURES) * 4.0**-i for n in "kv"}
            for i in range(LAYERS)
        ]
    )
    return canonical, deltas


def error(deltas, patch) -> float:
    lost = sum(
        (delta - (layer[name].dense() if name in layer else 0)).double().square().sum()
        for truth, layer in zip(deltas, patch.layers, strict=True)
        for name, delta in truth.items()
    )
    return float(lost)


def test_without_a_share_the_patch_is_the_plain_one():
    canonical, deltas = scene()
    (patch, energy), filled = PatchBudget(7).form(deltas, _layout(), canonical)
    plain = patch_of(deltas, 7, torch.float32)
    assert error(deltas, patch) == error(deltas, plain.patch) and energy == plain.energy
    assert filled == PatchBudget(7, None) and patch.rank == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_patch_is_not_cut_for_the_shares_sake(dtype):
    canonical, deltas = scene(dtype)
    (patch, _), filled = PatchBudget(8, 0.01).form(deltas, _layout(), canonical)
    assert 0.01 * kv_bytes(canonical) < patch.nbytes <= SMALL
    # and is recorded as one that no share has cut
    assert filled == PatchBudget(8, None) and patch.rank == 8
    assert {t.dtype for layer in patch.layers for f in layer.values() for t in (f.left, f.right)} == {dtype}


def test_a_plain_patch_over_budget_is_replaced_by_a_better_one():
    canonical, deltas = scene(tokens=4096)
    share = 0.04
    (patch, energy), filled = PatchBudget(32, share).form(deltas, _layout(), canonical)
    allowed = int(share * kv_bytes(canonical))
    assert allowed > SMALL and 0.9 * allowed < patch.nbytes <= allowed
    assert filled == PatchBudget(32, share) and patch.rank <= 32
    # more layers are served, and more of what counts is kept, than by one rank for all at these bytes
    rank = next(r for r in range(32, 0, -1) if patch_of(deltas, r, torch.float32).patch.nbytes <= allowed)
    plain = patch_of(deltas, rank, torch.float32)
    assert energy > plain.energy and error(deltas, patch) < 0.5 * error(deltas, plain.patch)


def test_the_rank_still_bounds_every_channel():
    _, deltas = scene()
    free = compress(deltas, _layout(), 100_000)
    bound = compress(deltas, _layout(), 100_000, rank=5)
    assert free.patch.rank > 5 and bound.patch.rank == 5 and bound.patch.nbytes < free.patch.nbytes


@pytest.mark.parametrize(
    ("asked", "held", "tokens", "met"),
    [
        ((8, None), (8, None), 100, True),
        ((8, None), (4, None), 100, False),
        ((8, None), (4, None), 4, True),  # it holds all the chunk has
        ((8, None), (8, 0.5), 100, False),  # bytes have cut it
        ((8, 0.03), (8, None), 100, True),
        ((8, 0.03), (8, 0.03), 100, True),
        ((8, 0.03), (8, 0.05), 100, True),
        ((8, 0.03), (8, 0.02), 100, False),
        ((8, 0.03), (4, 0.05), 100, False),
    ],
)
def test_a_stored_patch_serves_who_asks_for_no_more(asked, held, tokens, met):
    assert PatchBudget(*asked).is_met_by(PatchBudget(*held), tokens) is met


def test_a_budget_reads_back_and_defaults_to_rank_alone():
    for budget in (PatchBudget(8, 0.25), PatchBudget(3), PatchBudget(3, 0.1, (0, 2))):
        assert PatchBudget.from_info(budget.to_info(), 1) == budget
    assert PatchBudget.from_info({"asked_rank": 16}, 5) == PatchBudget(16, None)
    assert PatchBudget.from_info({}, 5) == PatchBudget(5, None)


@pytest.mark.parametrize(("rank", "share"), [(0, None), (1, 0.0), (1, -0.1), (1, 1.5), (1, float("nan"))])
def test_what_is_no_budget_is_refused(rank, share):
    with pytest.raises(ValueError, match=r"rank 0 must be|patch_bytes .* must be a share"):
        PatchBudget(rank, share)


@pytest.mark.parametrize("share", [None, 0.04])
def test_only_the_layers_asked_for_are_corrected(share, monkeypatch):
    monkeypatch.setattr("kamera.ops.budget.SMALL", 0)
    canonical, deltas = scene(tokens=1024)
    (all_of_it, _), _ = PatchBudget(40, share).form(deltas, _layout(), canonical)
    (patch, energy), filled = PatchBudget(40, share, (1, 2)).form(deltas, _layout(), canonical)
    assert [sorted(layer) for layer in patch.layers] == [[], ["k", "v"], ["k", "v"], []]
    assert filled.layers == (1, 2) and filled.share == share
    # what is left out counts as lost: nearly all energy is in layer 0
    assert energy == pytest.approx(1 - error(deltas, patch) / error(deltas, Patch.of(({},) * LAYERS)))
    assert energy < 0.1
    if share is None:
        assert all(torch.equal(all_of_it.layers[1][n].left, patch.layers[1][n].left) for n in "kv")
    else:  # the bytes that layer 0 does not take are spent on the others
        assert error(deltas[1:3], Patch.of(patch.layers[1:3])) < error(
            deltas[1:3], Patch.of(all_of_it.layers[1:3])
        )


@pytest.mark.parametrize(
    ("asked", "held", "met"),
    [
        (None, None, True),
        ((1, 2), None, True),
        ((1, 2), (1, 2), True),
        ((1, 2), (0, 1, 2), True),
        ((1, 2), (1, 3), False),
        (None, (0, 1, 2, 3), False),  # it does not say that these are all
    ],
)
def test_a_patch_of_fewer_layers_does_not_serve(asked, held, met):
    assert PatchBudget(4, None, asked).is_met_by(PatchBudget(4, None, held), 100) is met


@pytest.mark.parametrize(
    ("one", "other"),
    [((4, None, (1,)), (8, 0.1, (2, 3))), ((4, 0.2, None), (8, 0.1, (2,))), ((4, 0.2), (4, 0.1))],
)
def test_a_joined_budget_meets_both(one, other):
    one, other = PatchBudget(*one), PatchBudget(*other)
    both = one.union(other)
    assert both == other.union(one)
    assert one.is_met_by(both, 100) and other.is_met_by(both, 100)
    assert both.rank == max(one.rank, other.rank)


@pytest.mark.parametrize(
    ("given", "layers"), [(None, None), ("2:5", (2, 3, 4)), ([3, 1, 3], (1, 3)), ("0:1", (0,))]
)
def test_layers_are_numbers_or_a_range(given, layers):
    assert layers_of(given) == layers


@pytest.mark.parametrize("given", ["", "3", "5:2", "2:2", ":4", "-1:3", [], [-1], [1.0], [True], ["1"]])
def test_what_names_no_layers_is_refused(given):
    with pytest.raises(ValueError, match="give numbers from 0 on"):
        layers_of(given)


def test_a_layer_the_model_does_not_have_is_refused():
    canonical, deltas = scene()
    with pytest.raises(ValueError, match="layer 4 of a model of 4 layers"):
        PatchBudget(4, None, (0, 4)).form(deltas, _layout(), canonical)
    PatchBudget(4, None, (0, 3)).check(4)


def test_deficits_come_from_the_ops_that_serve_them():
    canonical, _ = scene()
    moved = kv_map(canonical, lambda t: t + 1)
    deltas = deficit(moved, canonical, _layout(), [0])
    (patch, _), _ = PatchBudget(4, 0.03).form(deltas, _layout(), canonical)
    assert error(deltas, patch) < 1e-3  # a constant is of rank one
