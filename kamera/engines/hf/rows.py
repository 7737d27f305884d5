"""A few tokens of a chunk without the others: their share of its encoding, and their mask."""

from __future__ import annotations

import torch

from kamera.content import Encoded
from kamera.engines.hf.encode import SEEN, input_device, is_flat
from kamera.engines.hf.model import Model
from kamera.errors import UnsupportedBackbone


def refuse_unmaskable(model: Model, encoded: Encoded) -> None:
    """Raise UnsupportedBackbone if a token cannot be run apart from the tokens after it."""
    name = type(model.model).__name__
    attention = getattr(model.decoder.config, "_attn_implementation", None)
    if attention not in ("eager", "sdpa"):
        raise UnsupportedBackbone(
            f"{name} attends with {attention!r}, which takes no additive mask: load it with "
            'attn_implementation="sdpa" or "eager" to recompute single tokens'
        )
    if encoded.tensors and not model.facts.joins:
        raise UnsupportedBackbone(
            f"{name} lets the tokens of a picture see each other: a few of them cannot be recomputed "
            "apart; recompute the whole chunk (prefill)"
        )


def refuse_undivided(encoded: Encoded) -> None:
    """Raise UnsupportedBackbone for an encoding that does not divide into tokens."""
    count = encoded.num_tokens
    for name, tensor in encoded.tensors.items():
        by_picture = is_flat(name) and SEEN in encoded.tensors
        if not by_picture and not (tensor.dim() >= 2 and tensor.shape[:2] == (1, count)):
            raise UnsupportedBackbone(
                f"the decoder takes {name} of shape {tuple(tensor.shape)}, which has no entry per token of "
                f"{count}: single tokens of this chunk cannot be recomputed"
            )


def take(encoded: Encoded, rows: torch.Tensor) -> Encoded:
    """The rows' share of an encoding. Raises UnsupportedBackbone."""
    refuse_undivided(encoded)
    count = encoded.num_tokens
    taken: dict[str, torch.Tensor] = {}
    seen = encoded.tensors.get(SEEN)
    for name, tensor in encoded.tensors.items():
        if is_flat(name) and seen is not None:
            # one row per picture token: find the chosen ones among them
            among = torch.full((count,), -1)
            pictured = seen.reshape(-1).cpu().bool()
            among[pictured] = torch.arange(int(pictured.sum()))
            wanted = among[rows]
            taken[name] = tensor[wanted[wanted >= 0].to(tensor.device)]
        else:
            taken[name] = tensor[:, rows.to(tensor.device)]
    return Encoded(encoded.input_ids[rows], {}, taken)


def row_masks(model: Model, places: torch.Tensor, total: int) -> torch.Tensor | dict[str, torch.Tensor]:
    """The additive mask of rows at ``places`` over ``total`` tokens; by type for layers of several types.

    Additive, in the model's dtype: eager attention would add a boolean one as zeros and ones.
    """
    dtype = next(p.dtype for p in model.model.parameters() if p.is_floating_point())
    key, query = torch.arange(total)[None], places[:, None]

    def additive(seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return mask[None, None].to(input_device(model.model))

    causal, window = key <= query, getattr(model.config, "sliding_window", None)
    kinds = set(getattr(model.config, "layer_types", None) or ["sliding_attention"])
    if window is None or "sliding_attention" not in kinds:
        return additive(causal)
    narrow = additive(causal & (key > query - window))
    return (
        narrow if len(kinds) == 1 else dict.fromkeys(kinds, additive(causal)) | {"sliding_attention": narrow}
    )
