"""Recompute chosen tokens of a chunk in context, as token-axis repairs of reused KV do.

The chosen rows run through the model's own decoder. At every layer their fresh KV replaces the held KV
in place, and they attend over [context ‖ chunk], reused rows included, to everything up to themselves.
Rows run at their own positions, with their own share of the chunk's encoding (embeddings, DeepStack
features, expert routing), so nothing here depends on the model's family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kamera.content import Encoded
from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.encode import decoder_arguments, with_batch
from kamera.engines.hf.sample import encoding_rows, refuse_undivided, row_masks
from kamera.ops import KV, LayerKV, Layout, kv_concat, kv_tokens
from lab.hooks import on_entry

Keep = Callable[[int, torch.Tensor, LayerKV, LayerKV], torch.Tensor]
"""(layer, rows computed here, their fresh KV, their held KV) -> the rows that are kept.

Rows are tokens of the chunk, int64 ``[k]``; KV is ``[heads, k, dim]`` per channel, at the chunk's place.
Kept rows are written at this layer and go on to the next; the others are computed no further.
"""


@dataclass(frozen=True, eq=False)
class Resume:
    """The entry of a recompute into the decoder: ``hidden`` ``[tokens, width]``, the input of ``layer``.

    ``hidden`` covers the whole chunk, as `hidden_states` returns it. Hidden states carry no position
    beyond their distances, so those of the canonical serve at any place.
    """

    layer: int
    hidden: torch.Tensor


@dataclass(frozen=True, eq=False)
class Recomputed:
    """The chunk's mixed KV at its place, and the rows that are fresh in it: per layer, ascending."""

    kv: KV
    rows: tuple[torch.Tensor, ...]


Choose = Callable[[int, LayerKV, LayerKV], torch.Tensor]
"""(layer, fresh KV of the rows that run, KV held there) -> indices of the rows to write."""


class OverwritingCache(DynamicCache):
    """A cache in which computed KV overwrites held tokens, instead of being appended to them.

    Takes over ``held``, whose tensors are written in place and must not be in use elsewhere. The rows of a
    forward are at ``places`` (int64 ``[rows]``, indices into the held tokens). At every layer ``choose``
    selects the rows that are written; the others leave the held tokens unchanged.
    """

    def __init__(self, held: DynamicCache, layout: Layout, places: torch.Tensor, choose: Choose) -> None:
        super().__init__()
        self.layers = held.layers
        self._layout, self._places, self._choose = layout, places, choose
        self._chosen: dict[int, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the chosen rows of layer ``layer_idx``; returns all it holds."""
        layer: Any = self.layers[layer_idx]
        places = self._places.to(layer.keys.device)
        held = {"keys": layer.keys, "values": layer.values}
        new = {"keys": key_states, "values": value_states}
        named = {c.name: c.tensor for c in self._layout[layer_idx].channels if c.tensor in held}
        chosen = self._choose(
            layer_idx,
            {name: new[t][0] for name, t in named.items()},
            {name: held[t][0].index_select(1, places) for name, t in named.items()},
        ).to(places.device)
        self._chosen[layer_idx] = chosen
        for name, tensor in held.items():
            tensor[:, :, places[chosen]] = new[name][:, :, chosen]
        return layer.keys, layer.values

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the rows `update` chose in this layer; returns all indexer keys."""
        layer: Any = self.layers[layer_idx]
        chosen = self._chosen[layer_idx]
        layer.indexer_keys[:, self._places.to(chosen.device)[chosen]] = indexer_key_states[:, chosen]
        keys: torch.Tensor = layer.indexer_keys
        return keys


def recompute(
    backbone: HfEngine,
    encoded: Encoded,
    positions: torch.Tensor,
    context: KV,
    held: KV,
    rows: torch.Tensor,
    *,
    keep: Keep | None = None,
    resume: Resume | None = None,
) -> Recomputed:
    """Recompute ``rows`` (tokens of the chunk, int64 ``[k]``) of ``held`` behind ``context``.

    ``held`` is the chunk's KV at ``positions`` ``[axes, tokens]``, ``context`` the KV of all before it.
    ``keep`` narrows the rows from layer to layer (default: all rows at all layers). With ``resume``
    the layers before ``resume.layer`` stay as held; they still run, as part of the model's own
    forward, and their results are dropped. One decoder forward; inputs are not modified.

    Raises UnsupportedBackbone if rows cannot run apart from their chunk: attention kernels without
    an additive mask, picture tokens that see later ones, an encoding without a token axis. ValueError
    for rows outside the chunk or a layer outside the model.
    """
    rows = torch.unique(rows.to(device="cpu", dtype=torch.int64))
    count, before = encoded.num_tokens, kv_tokens(context)
    if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < count:
        raise ValueError(f"rows {int(rows[0])}..{int(rows[-1])} are outside a chunk of {count} tokens")
    start = 0 if resume is None else resume.layer
    if not 0 <= start < len(backbone.layout):
        raise ValueError(f"layer {start} is outside a model of {len(backbone.layout)}")
    refuse_undivided(backbone, encoded)
    backbone.limits.check_tokens(positions)
    nothing = rows[:0]
    fresh: list[torch.Tensor] = [nothing] * len(backbone.layout)
    if rows.numel() == 0:
        return Recomputed(held, tuple(fresh))
    alive = rows

    def choose(layer: int, new: LayerKV, old: LayerKV) -> torch.Tensor:
        nonlocal alive
        if layer < start:
            return nothing
        if keep is not None:
            here = torch.searchsorted(rows, alive)
            kept = keep(layer, alive, _at(new, here), _at(old, here))
            kept = torch.unique(kept.to(device="cpu", dtype=torch.int64))
            if not bool(torch.isin(kept, alive).all()):
                raise ValueError(
                    f"keep gave rows {kept.tolist()} at layer {layer}: {alive.tolist()} run there"
                )
            alive = kept
        fresh[layer] = alive
        return torch.searchsorted(rows, alive)

    cache = OverwritingCache(
        forwards.make_cache(backbone, [kv_concat([context, held])]), backbone.layout, before + rows, choose
    )
    arguments = decoder_arguments(encoding_rows(encoded, rows), backbone.model.device) | {
        "position_ids": with_batch(positions[:, rows]).to(backbone.model.device),
        "past_key_values": cache,
        "use_cache": True,
    }
    mask = row_masks(backbone, before + rows, before + count)
    with torch.no_grad(), backbone.turns.alone(), _enter(backbone, resume, rows):
        backbone.decoder(attention_mask=mask, **arguments)
    return Recomputed(model_cache.read(cache, backbone.layout, backbone.groups, before), tuple(fresh))


def hidden_states(
    backbone: HfEngine, encoded: Encoded, positions: torch.Tensor, context: KV, layer: int
) -> torch.Tensor:
    """The input of decoder layer ``layer`` for a span prefilled behind ``context``: ``[tokens, width]``."""
    caught: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caught.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    with on_entry(backbone.decoder.layers[layer], watch):
        forwards.run(backbone, encoded, positions, forwards.make_cache(backbone, [context]))
    return caught[0]


@contextmanager
def _enter(backbone: HfEngine, resume: Resume | None, rows: torch.Tensor) -> Iterator[None]:
    """While open, the rows' input of ``resume.layer`` is replaced by the given hidden states."""
    if resume is None:
        yield
        return
    given = resume.hidden[rows.to(resume.hidden.device)][None]

    def replace(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (given.to(args[0].device), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": given.to(kwargs["hidden_states"].device)}

    with on_entry(backbone.decoder.layers[resume.layer], replace):
        yield


def _at(kv: LayerKV, rows: torch.Tensor) -> LayerKV:
    return {name: t.index_select(1, rows.to(t.device)) for name, t in kv.items()}
