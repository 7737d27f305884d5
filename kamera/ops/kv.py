"""The KV of a span of tokens, outside any cache: layers of named channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

LayerKV = Mapping[str, torch.Tensor]
"""One layer: channel name -> ``[heads, tokens, dim]``."""

KV = Sequence[LayerKV]
"""All layers, in decoder order. A layer without KV of its own is an empty mapping."""


def kv_tokens(kv: KV) -> int:
    """Number of tokens of the span (0 if no layer holds KV)."""
    for layer in kv:
        for tensor in layer.values():
            return tensor.shape[1]
    return 0


def kv_bytes(kv: KV) -> int:
    """Bytes of all channels of all layers."""
    return sum(t.numel() * t.element_size() for layer in kv for t in layer.values())


def kv_map(kv: KV, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[LayerKV, ...]:
    """Apply ``function`` to every channel tensor and keep the structure."""
    return tuple({name: function(t) for name, t in layer.items()} for layer in kv)


def kv_slice(kv: KV, start: int, stop: int) -> tuple[LayerKV, ...]:
    """Views of the tokens ``start:stop``."""
    return kv_map(kv, lambda t: t[:, start:stop])


def kv_concat(spans: Sequence[KV]) -> tuple[LayerKV, ...]:
    """Join spans of the same layout along the token axis (copies)."""
    if not spans:
        raise ValueError("kv_concat needs at least one span, got none")
    first = spans[0]
    return tuple(
        {name: torch.cat([span[i][name] for span in spans], dim=1) for name in first[i]}
        for i in range(len(first))
    )


def kv_distance(kv: KV, reference: KV) -> float:
    """Relative L2 distance of ``kv`` from ``reference``: the largest of all layers and channels.

    NaN if any of them is; 0.0 for spans without tokens.
    """
    worst = 0.0
    for layer, wanted in zip(kv, reference, strict=True):
        for name, want in wanted.items():
            true = want.double()
            apart = float((layer[name].double() - true).norm() / true.norm().clamp_min(1e-30))
            worst = apart if not apart <= worst else worst
    return worst
