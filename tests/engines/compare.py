"""How far two KVs are apart, and the small steps most tests begin with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.content import Encoded
from kamera.engines.hf import HfEngine
from kamera.ops import KV
from tests.models import samples


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def worst(got: KV, want: KV, layers: Sequence[int] | None = None) -> float:
    """Largest relative L2 error over layers and channels."""
    chosen = range(len(want)) if layers is None else layers
    errors = []
    for i in chosen:
        assert got[i].keys() == want[i].keys()
        errors += [relative(got[i][name], want[i][name]) for name in want[i]]
    assert errors, "no KV to compare"
    return max(errors)


def encoded(backbone: HfEngine, name: str, seed: int = 0) -> Encoded:
    """The family's sample, through `chunk_from_tensors` and `encode`."""
    return backbone.encode(samples.chunk(backbone, samples.sample(name, seed)))


def text(n: int, seed: int = 0) -> Encoded:
    """Text tokens, which need no encoding."""
    return Encoded(samples.text_ids(n, seed))


def positions(backbone: HfEngine, *spans: Encoded) -> list[torch.Tensor]:
    """The model's positions of spans that stand one after another, cut by span."""
    whole = backbone.positions([s.input_ids for s in spans], [s.position_inputs for s in spans])
    return list(whole.split([s.num_tokens for s in spans], dim=1))


def shifted(place: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """``place`` plus one offset per axis."""
    return place + torch.tensor(offset)[:, None]


def offset_between(old: torch.Tensor, new: torch.Tensor) -> tuple[int, ...]:
    """The first token's step, once every token is seen to make the same one."""
    step = new - old
    assert bool((step == step[:, :1]).all())
    return tuple(int(s) for s in step[:, 0])
