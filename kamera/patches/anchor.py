"""The anchor: the tokens every window begins with, prefilled once and always exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera.content import Encoded, Spoken
from kamera.engines.hf import Backbone
from kamera.ops import KV, kv_map, tensor_digest


@dataclass(frozen=True, eq=False)
class Anchor:
    """Token ids ``[tokens]``, positions ``[axes, tokens]``, KV, and what a question ends with.

    ``tail`` and ``reopen`` are the chat template's text after a question and after an answer.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv: KV
    digest: str
    tail: str
    reopen: str

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.input_ids.shape[0])


def prefill_anchor(backbone: Backbone, system: Spoken | None) -> Anchor:
    """Tokenise and prefill a system prompt, text or messages; token ids are taken as they are."""
    seams = backbone.seams(system if isinstance(system, str) else None)
    return anchor_of(backbone, anchor_ids(backbone, system), seams.tail, seams.reopen)


def anchor_ids(backbone: Backbone, system: Spoken | None) -> torch.Tensor:
    """Token ids ``[tokens]`` a window under this system prompt begins with; nothing is prefilled.

    Without a processor, None is an anchor of no tokens and text raises ProcessorRequired.
    """
    return backbone.builder.anchor_ids(system)


def anchor_of(backbone: Backbone, ids: torch.Tensor, tail: str, reopen: str) -> Anchor:
    """The anchor of given token ids, prefilled."""
    positions = backbone.positions([ids], [{}])
    kv: KV = backbone.no_kv()
    if ids.shape[0]:
        kv, _ = backbone.prefill(Encoded(ids, {}, {}), positions)
        kv = kv_map(kv, lambda t: t.detach().clone())
    return Anchor(ids, positions, kv, tensor_digest(ids), tail, reopen)
