"""Embedding of a chunk's pictures: the mean of its vision features.

The features are those that the decoder receives in the place of picture tokens (the encoding of a
canonical). They were computed before the decoder, so neither the anchor nor anything else in
a window is in them. DeepStack features are extra layers of the same pictures and are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np
import torch


def mean_features(
    input_ids: torch.Tensor, embeds: Mapping[str, torch.Tensor], vision_tokens: Sequence[int]
) -> np.ndarray | None:
    """Unit vector ``[width]`` (float32) of a chunk, None for one without pictures.

    ``input_ids`` ``[S]``; ``embeds["inputs_embeds"]`` ``[1, S, width]``, averaged over the positions of
    ``vision_tokens`` and normalised. None, too, for features that are zero or not finite.
    """
    features = embeds.get("inputs_embeds")
    if features is None or not vision_tokens:
        return None
    vision_mask = torch.isin(input_ids, torch.tensor(list(vision_tokens)))
    rows = features.reshape(-1, features.shape[-1])
    if rows.shape[0] != vision_mask.shape[0] or not bool(vision_mask.any()):
        return None
    mean = rows[vision_mask.to(rows.device)].to(device="cpu", dtype=torch.float64).mean(0)
    return unit_vector(mean.numpy())


def picture_embedding(
    input_ids: torch.Tensor, embeds: Mapping[str, torch.Tensor], vision_tokens: Sequence[int]
) -> str:
    """The `mean_features` of a chunk's pictures as its record holds them; "" without pictures."""
    return pack(mean_features(input_ids, embeds, vision_tokens))


def unit_vector(vector: np.ndarray) -> np.ndarray | None:
    """``vector`` at length 1, float32; None if it has no direction."""
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0.0:
        return None
    scaled: np.ndarray = (vector / length).astype(np.float32)
    return scaled


def pack(vector: np.ndarray | None) -> str:
    """A unit vector as text, in half precision; "" for none."""
    return "" if vector is None else base64.b64encode(vector.astype("<f2").tobytes()).decode()


def unpack(text: str) -> np.ndarray | None:
    """The vector ``[width]`` (float32) of `pack`. Raises `ValueError` for another text."""
    vector = np.frombuffer(base64.b64decode(text, validate=True), "<f2").astype(np.float32)
    if not np.isfinite(vector).all():
        raise ValueError(f"an embedding of {len(vector)} features that are not all finite")
    return vector if len(vector) else None
