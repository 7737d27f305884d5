"""Embedding of a chunk's pictures: the mean of its vision features.

The features are those that the decoder receives in the place of picture tokens (the encoding of a
canonical). They were computed before the decoder, so neither the anchor nor anything else in
a window is in them. DeepStack features are extra layers of the same pictures and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kamera.ops import digest
from kamera.store.encoding import EncodingRecord
from kamera.store.records import CanonicalRecord

VISION_TOKENS = "vision_tokens"
"""Key of `CanonicalRecord.info` for the token ids that stand for picture features."""


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
    seen = torch.isin(input_ids, torch.tensor(list(vision_tokens)))
    rows = features.reshape(-1, features.shape[-1])
    if rows.shape[0] != seen.shape[0] or not bool(seen.any()):
        return None
    mean = rows[seen.to(rows.device)].to(device="cpu", dtype=torch.float64).mean(0)
    return unit(mean.numpy())


def embedding_of(record: CanonicalRecord, encoding: EncodingRecord | None) -> np.ndarray | None:
    """`mean_features` of a stored canonical and its encoding."""
    tokens = record.info.get(VISION_TOKENS, ())
    if not isinstance(tokens, list | tuple) or not all(type(token) is int for token in tokens):
        return None
    return None if encoding is None else mean_features(record.input_ids, encoding.embeds, tokens)


def unit(vector: np.ndarray) -> np.ndarray | None:
    """``vector`` at length 1, float32; None if it has no direction."""
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0.0:
        return None
    scaled: np.ndarray = (vector / length).astype(np.float32)
    return scaled


def pack(name: str, chunk_id: str, vector: np.ndarray | None) -> bytes:
    """An embedding as bytes, with a digest that binds the object's ``name``."""
    body = b"" if vector is None else vector.astype("<f2").tobytes()
    seal = bytes.fromhex(digest("kamera.embedding.v1", name, chunk_id, body))
    label = chunk_id.encode()
    return seal + len(label).to_bytes(4, "little") + label + body


def unpack(name: str, data: bytes) -> tuple[str, np.ndarray | None]:
    """Chunk id and vector of `pack`. Raises `ValueError` for bytes that `pack` did not make for ``name``."""
    length = int.from_bytes(data[32:36], "little")
    chunk_id, body = data[36 : 36 + length].decode(), data[36 + length :]
    if data[:32].hex() != digest("kamera.embedding.v1", name, chunk_id, body):
        raise ValueError("the digest does not match")
    return chunk_id, np.frombuffer(body, "<f2").astype(np.float32) if body else None
