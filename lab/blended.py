"""CacheBlend over a whole window, each chunk behind repaired ones: what samples are held against."""

from __future__ import annotations

from functools import partial

import torch

from kamera.ops import KV, LayerKV, kv_concat, relocate_kv, uniform_offset
from lab.baselines.cacheblend import SLOPE
from lab.baselines.deviation import deviation, highest
from lab.composed.windows import Pool, Window
from lab.paper.draw import TARGET
from lab.recompute import recompute


def blended(stage: Pool, window: Window, share: float, survivors: bool) -> tuple[list[KV], float]:
    """CacheBlend over a window: of each chunk the tokens that deviate most at the first layer are recomputed.

    From the KV that chunks had in the old window (``survivors``), or from canonicals. The first chunk stands
    on its canonical. Also the tokens that ran, each by the share of the layers that it ran in.
    """
    order, old = (*window.order, TARGET), (*window.old, TARGET)
    shared, layers = stage.scene(window.order)._shared, len(stage.backbone.layout)
    held = dict(zip(old, [step.kv for step in shared.trunk(stage.chunks(old))[1:]], strict=True))
    stood = dict(zip(old, shared.places(stage.chunks(old)), strict=True))
    kvs, ran = [shared.canonical(stage.chunk(order[0])).kv], 0.0
    live = [i for i, spec in enumerate(stage.backbone.layout) if i and spec.channels]
    for frame, place in list(zip(order, shared.places(stage.chunks(order)), strict=True))[1:]:
        alone = shared.canonical(stage.chunk(frame))
        stays = survivors and frame in held
        kv, home = (held[frame], stood[frame]) if stays else (alone.kv, alone.positions)
        offset = uniform_offset(home, place)
        assert offset is not None, "frames of a testbed move as a whole"
        base, tokens = relocate_kv(kv, stage.backbone.layout, offset), place.shape[1]
        counts = {
            layer: min(tokens, round(share * tokens * (1 + SLOPE * (1 - 2 * step / max(1, len(live) - 1)))))
            for step, layer in enumerate(live)
        }
        keep_rows = partial(_deviating, live[0], counts)
        encoded, context = shared.encoded(stage.chunk(frame)), kv_concat([stage.anchor.kv, *kvs])
        made = recompute(stage.backbone, encoded, place, context, base, torch.arange(tokens), keep=keep_rows)
        ran += (tokens * (live[0] + 1) + sum(made.rows[i].numel() for i in live[:-1])) / layers
        kvs.append(made.kv)
    return kvs, ran


def _deviating(
    first: int, counts: dict[int, int], layer: int, rows: torch.Tensor, fresh: LayerKV, held: LayerKV
) -> torch.Tensor:
    if layer < first:
        return rows
    return rows[highest(deviation(fresh, held), min(counts[layer], rows.numel()))]
