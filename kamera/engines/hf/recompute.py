"""Recompute chosen tokens of a chunk in context, as token-axis repairs of reused KV do.

The chosen rows run through the model's own decoder. At every layer their fresh KV replaces the held KV
in place, and they attend over [context ‖ chunk], reused rows included, to everything up to themselves.
Rows run at their own positions, with their own share of the chunk's encoding (embeddings, DeepStack
features, expert routing), so nothing here depends on the model's family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.encode import batched, decoder_arguments
from kamera.engines.hf.hooks import hooked, on_entry
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, LayerKV, kv_concat, kv_tokens

if TYPE_CHECKING:
    from kamera.engines.hf.backbone import Backbone

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


def recompute(
    backbone: Backbone,
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
    refuse_unmaskable(backbone, encoded)
    backbone.check_positions(positions)
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

    cache = model_cache.OverwritingCache(
        backbone.cache([kv_concat([context, held])]), backbone.layout, before + rows, choose
    )
    arguments = decoder_arguments(take(encoded, rows), backbone.device) | {
        "position_ids": batched(positions[:, rows]).to(backbone.device),
        "past_key_values": cache,
        "use_cache": True,
    }
    with (
        torch.no_grad(),
        backbone.alone(),
        row_masks(backbone, before + rows, before + count) as mask,
        _enter(backbone, resume, rows),
    ):
        backbone.decoder(attention_mask=mask, **arguments)
    return Recomputed(model_cache.read(cache, backbone.layout, backbone.groups, before), tuple(fresh))


def hidden_states(
    backbone: Backbone, encoded: Encoded, positions: torch.Tensor, context: KV, layer: int
) -> torch.Tensor:
    """The input of decoder layer ``layer`` for a span prefilled behind ``context``: ``[tokens, width]``."""
    caught: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caught.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    with hooked(on_entry(backbone.decoder.layers[layer], watch)):
        backbone.run(encoded, positions, backbone.cache([context]))
    return caught[0]


def refuse_unmaskable(backbone: Backbone, encoded: Encoded) -> None:
    """Raise UnsupportedBackbone if a token cannot be run apart from the tokens after it."""
    name = type(backbone.model).__name__
    attention = getattr(backbone.decoder.config, "_attn_implementation", None)
    if attention not in ("eager", "sdpa"):
        raise UnsupportedBackbone(
            f"{name} attends with {attention!r}, which takes no additive mask: load it with "
            'attn_implementation="sdpa" or "eager" to recompute single tokens'
        )
    if encoded.tensors and backbone.masks_by_type:
        raise UnsupportedBackbone(
            f"{name} lets the tokens of a picture see each other: a few of them cannot be recomputed "
            "apart; recompute the whole chunk (prefill)"
        )


def take(encoded: Encoded, rows: torch.Tensor) -> Encoded:
    """The rows' share of an encoding."""
    count = encoded.num_tokens
    taken: dict[str, torch.Tensor] = {}
    seen = encoded.tensors.get("visual_pos_masks")
    for name, tensor in encoded.tensors.items():
        if name.startswith("deepstack") and seen is not None:
            # one row per picture token: find the chosen ones among them
            among = torch.full((count,), -1)
            pictured = seen.reshape(-1).cpu().bool()
            among[pictured] = torch.arange(int(pictured.sum()))
            wanted = among[rows]
            taken[name] = tensor[wanted[wanted >= 0].to(tensor.device)]
        elif tensor.dim() >= 2 and tensor.shape[:2] == (1, count):
            taken[name] = tensor[:, rows.to(tensor.device)]
        else:
            raise UnsupportedBackbone(
                f"the decoder takes {name} of shape {tuple(tensor.shape)}, which has no entry per token of "
                f"{count}: single tokens of this chunk cannot be recomputed"
            )
    return Encoded(encoded.input_ids[rows], {}, taken)


@contextmanager
def row_masks(backbone: Backbone, places: torch.Tensor, total: int) -> Iterator[torch.Tensor]:
    """The additive mask of rows at ``places`` over ``total`` tokens; sliding layers get their own.

    Additive, in the model's dtype: eager attention would add a boolean one as zeros and ones.
    """
    dtype = next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())
    key, query = torch.arange(total)[None], places[:, None]

    def additive(seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return mask[None, None].to(backbone.device)

    causal = key <= query
    window = getattr(backbone.config, "sliding_window", None)
    kinds: Sequence[str] = getattr(backbone.config, "layer_types", None) or ()
    handles = []
    if window is not None:
        narrow = additive(causal & (key > query - window))

        def slide(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"attention_mask": narrow.to(kwargs["attention_mask"].device)}

        for i, layer in enumerate(backbone.decoder.layers):
            if not kinds or kinds[i] == "sliding_attention":
                handles.append(on_entry(layer, slide))
    with hooked(*handles):
        yield additive(causal)


@contextmanager
def _enter(backbone: Backbone, resume: Resume | None, rows: torch.Tensor) -> Iterator[None]:
    """While open, the rows' input of ``resume.layer`` is replaced by the given hidden states."""
    if resume is None:
        yield
        return
    given = resume.hidden[rows.to(resume.hidden.device)][None]

    def replace(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (given.to(args[0].device), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": given.to(kwargs["hidden_states"].device)}

    with hooked(on_entry(backbone.decoder.layers[resume.layer], replace)):
        yield


def _at(kv: LayerKV, rows: torch.Tensor) -> LayerKV:
    return {name: t.index_select(1, rows.to(t.device)) for name, t in kv.items()}
