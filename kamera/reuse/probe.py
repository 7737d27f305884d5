"""The online probe: a few tokens of a segment are recomputed in context and compared at every layer."""

from __future__ import annotations

import torch

from kamera.content import Encoded
from kamera.engines import Engine, Sampling, Span
from kamera.ops import KV, Completion

ROWS = 2
"""Tokens that are recomputed for each segment."""


def probed(tokens: int) -> torch.Tensor:
    """The probed tokens of a segment of ``tokens``: its middle and its last, int64 ``[1 or 2]``."""
    return torch.unique(torch.tensor([tokens // 2, tokens - 1]))


def likeness(
    backbone: Engine,
    encoded: Encoded,
    positions: torch.Tensor,
    context: KV,
    held: KV,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cosines of tokens' held KV and their KV recomputed in context, float64 ``[layers, rows]``.

    ``held`` is the segment's KV at ``positions`` ``[axes, tokens]``, ``context`` the KV of all before,
    ``rows`` the tokens in ascending order (default: `probed`). Every channel of a layer is compared on its
    own, since keys outweigh values, and the least counts; a layer without KV of its own counts 1.0. One
    forward of the rows. Raises UnsupportedBackbone if tokens cannot run alone.
    """
    rows = probed(encoded.num_tokens) if rows is None else rows
    live, still = backbone.live(), (0,) * backbone.axes
    live.show([Span(kv, None, still) for kv in (context, held)])
    (fresh,) = backbone.sample([Sampling(encoded, positions, 1, Completion.none(rows, positions))], live)
    one = torch.ones(len(rows), dtype=torch.float64)
    return torch.stack(
        [
            torch.stack([one, *(_cosines(new[name], old[name], rows) for name in old)]).amin(0)
            for new, old in zip(fresh, held, strict=True)
        ]
    )


def _cosines(new: torch.Tensor, old: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    a, b = (t.index_select(1, rows.to(t.device)).double().transpose(0, 1).flatten(1) for t in (new, old))
    return torch.nn.functional.cosine_similarity(a, b, dim=1).cpu()
