"""A store full of chunks of the right shape, made of noise: no forward is run for any of them.

What a move costs is decided by shapes and bytes. So canonicals here are random, and every patch is one
and the same, factored once at the policy's own size, stored under whatever antecedents are asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.content.chunk import TOKEN_TYPES
from kamera.engines.hf import HfEngine, forwards
from kamera.store import CanonicalRecord, Context, EncodingRecord, PatchRecord
from kamera.window import former_of
from lab.speed.content import noise_kv, noise_patch, picture_chunk, words
from lab.speed.shape import FIRST_WORD, Preset

POLICY = ReusePolicy(certified=False, forms="always", audit=0.0)  # its KV is noise, which an audit would find
"""Random weights have no certificate, and what is served here is read by nobody."""
ANCHOR = 16
"""Tokens of the system prompt."""
PICTURE = 256
"""Tokens of a chunk's picture at the most; text is the rest, so that no vision tower works for minutes."""


class Stock:
    """Chunks of ``tokens`` tokens, archived in ``store`` when they are first asked for."""

    def __init__(self, backbone: HfEngine, preset: Preset, store: ChunkStore, tokens: int) -> None:
        self.backbone = backbone
        self.store = store
        self.tokens = tokens
        self._base = _with_text(picture_chunk(backbone, preset, min(tokens, PICTURE)), backbone, tokens)
        self._encoded = backbone.encode(self._base)
        self._anchor = anchor = former_of(self.window()).anchor
        self._context = anchor.identity.context(anchor.digest, store.tenant, store.kv)
        positions = backbone.positions(
            [anchor.input_ids, self._base.input_ids], [{}, self._encoded.position_inputs]
        )
        self._positions = positions[:, anchor.length :]
        self._chunks: list[Chunk] = []
        self.factors = noise_patch(noise_kv(backbone, tokens, seed=0), backbone.layout)

    def window(self) -> KameraWindow:
        """An empty one on this store, always under the same system prompt."""
        system = words(self.backbone, ANCHOR)
        return KameraWindow(self.backbone, self.store, system, policy=POLICY)

    def on(self, store: ChunkStore) -> Stock:
        """The same chunks and patch for another store."""
        other = copy.copy(self)
        other.store, other._chunks = store, []
        return other

    def chunk(self, index: int) -> Chunk:
        """The ``index``-th chunk, archived."""
        while len(self._chunks) <= index:
            self._chunks.append(self._archived(len(self._chunks)))
        return self._chunks[index]

    def patch(self, chunk_id: str, antecedents: Sequence[str]) -> None:
        """See to it that a patch for the chunk behind ``antecedents`` is stored."""
        if antecedents and not self.store.has(self._context, chunk_id, antecedents):
            info = POLICY.budget.to_info()
            self.store.put(
                PatchRecord(chunk_id, self._context, tuple(antecedents), "exact", self.factors, "exact", info)
            )

    @property
    def context(self) -> Context:
        """What its objects are stored under."""
        return self._context

    @property
    def kv_bytes(self) -> int:
        """Bytes of one chunk's KV."""
        return self.tokens * _token_bytes(self.backbone, phased_only=False)

    @property
    def key_bytes(self) -> int:
        """Bytes of those channels of one chunk that carry a phase."""
        return self.tokens * _token_bytes(self.backbone, phased_only=True)

    @property
    def patch_bytes(self) -> int:
        """Bytes of its patch."""
        return self.factors.nbytes

    def _archived(self, index: int) -> Chunk:
        size = self.backbone.model.get_input_embeddings().weight.shape[0]
        ids = self._base.input_ids.clone()
        ids[-1] = FIRST_WORD + index % (size - FIRST_WORD)  # every chunk ends with a word
        made = self.backbone.chunk_from_tensors(ids, label=f"stock {index}", **self._base.inputs)
        seen = self._anchor.identity.encoding_context(self.store.tenant)
        if self._encoded.tensors:
            self.store.put(EncodingRecord(made.id, seen, self.tokens, self._encoded.tensors))
        self.store.put(
            CanonicalRecord(
                chunk_id=made.id,
                context=self._context,
                input_ids=ids,
                positions=self._positions,
                kv=noise_kv(self.backbone, self.tokens, seed=index + 1),
                inputs=self._encoded.position_inputs,
                info={"label": made.label},
                vision=seen.fingerprint if self._encoded.tensors else "",
            )
        )
        return made


def _with_text(chunk: Chunk, backbone: HfEngine, tokens: int) -> Chunk:
    """The chunk and text behind it, ``tokens`` in all."""
    if chunk.num_tokens == tokens:
        return chunk
    ids = torch.cat([chunk.input_ids, words(backbone, tokens - chunk.num_tokens)])
    pictures: dict[str, Any] = {name: t for name, t in chunk.inputs.items() if name not in TOKEN_TYPES}
    return backbone.chunk_from_tensors(ids, **pictures)


def _token_bytes(backbone: HfEngine, *, phased_only: bool) -> int:
    held = zip(backbone.layout, forwards.allocate_kv(backbone, 0), strict=True)
    return sum(
        c.features * layer[c.name].element_size()
        for spec, layer in held
        for c in spec.channels
        if c.rope is not None or not phased_only
    )
