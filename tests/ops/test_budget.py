"""How large a patch may be: plain where that fits, the bytes well spent where it does not."""

import pytest
import torch

from kamera.ops import (
    Channel,
    LayerLayout,
    Patch,
    PatchBudget,
    kv_bytes,
    kv_of,
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
