"""The KV of a span of tokens, outside any cache: blocks of named channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from kamera.ops.blocks import Blocks, Groups, blocks_map, equal_groups

LayerKV = Mapping[str, torch.Tensor]
"""One layer: channel name -> ``[heads, tokens, dim]``."""

KV = Blocks[torch.Tensor]
"""All layers: channel -> ``[layers, heads, tokens, dim]`` for each group of equal layers."""

NO_KV: KV = Blocks((), ())
"""The KV of no layer."""


def kv_of(layers: Sequence[LayerKV], groups: Groups | None = None) -> KV:
    """Blocks of layers in decoder order, which are copied.

    ``groups`` defaults to layers of the same channels, shapes, dtypes and devices. Raises ValueError for
    groups of layers that differ.
    """
    if groups is None:
        groups = equal_groups(
            [[(n, t.shape, t.dtype, t.device) for n, t in layer.items()] for layer in layers]
        )
    parts: list[LayerKV] = []
    for group in groups:
        first = layers[group[0]]
        if any(layers[i].keys() != first.keys() for i in group):
            raise ValueError(f"layers {list(group)} do not have the same channels: they are not one block")
        parts.append({name: torch.stack([layers[i][name] for i in group]) for name in first})
    return Blocks(parts, groups)


def regroup(kv: KV, groups: Groups) -> KV:
    """``kv`` in other groups: itself if they are its own, else a copy."""
    return kv if kv.groups == groups else kv_of(list(kv), groups)


def kv_tensors(kv: KV) -> Iterator[torch.Tensor]:
    """The tensors that a KV keeps in memory: its blocks, or their codes; nothing that stands elsewhere."""
    return kv.contents()


def kv_tokens(kv: KV) -> int:
    """Number of tokens of the span (0 if no layer holds KV)."""
    told: int | None = getattr(kv, "tokens", None)  # one whose parts are made at each read
    if told is not None:
        return told
    for block in kv.parts:
        for tensor in block.values():
            return tensor.shape[2]
    return 0


def kv_bytes(kv: KV) -> int:
    """Bytes of all channels of all layers."""
    return sum([t.nbytes for block in kv.parts for t in block.values()])


def kv_map(kv: KV, function: Callable[[torch.Tensor], torch.Tensor]) -> KV:
    """Apply ``function`` to every block ``[layers, heads, tokens, dim]`` and keep the structure."""
    return blocks_map(kv, function)


def kv_slice(kv: KV, start: int, stop: int) -> KV:
    """Views of the tokens ``start:stop``."""
    return Blocks([{n: t[:, :, start:stop] for n, t in block.items()} for block in kv.parts], kv.groups)


def kv_copy(kv: KV) -> KV:
    """A copy that shares no memory with ``kv`` and has no gradient."""
    return Blocks([{n: t.detach().clone() for n, t in block.items()} for block in kv.parts], kv.groups)


def kv_concat(spans: Sequence[KV]) -> KV:
    """Join spans of the same layout along the token axis (copies)."""
    if not spans:
        raise ValueError("kv_concat needs at least one span, got none")
    groups = spans[0].groups
    spans = [regroup(span, groups) for span in spans]
    return Blocks(
        [
            {n: torch.cat([span.parts[g][n] for span in spans], dim=2) for n in spans[0].parts[g]}
            for g in range(len(groups))
        ],
        groups,
    )


def kv_distance(kv: KV, reference: KV) -> float:
    """Relative L2 distance of ``kv`` from ``reference``: the largest of all layers and channels.

    NaN if any of them is; 0.0 for spans without tokens.
    """
    worst = 0.0
    for block, wanted in zip(regroup(kv, reference.groups).parts, reference.parts, strict=True):
        for name, want in wanted.items():
            true = want.double()
            lost, whole = (
                torch.linalg.vector_norm(x, dim=(1, 2, 3)) for x in (block[name].double() - true, true)
            )
            apart = float((lost / whole.clamp_min(1e-30)).max())
            worst = apart if not apart <= worst else worst
    return worst
