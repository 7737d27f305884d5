"""The anchor: the tokens every window begins with, prefilled once and always exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.backbones import Backbone, Encoded
from kamera.ops import KV, kv_map
from kamera.ops.digest import tensor_digest


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


def prefill_anchor(backbone: Backbone, system: str | torch.Tensor | Sequence[int] | None) -> Anchor:
    """Tokenise and prefill a system prompt; token ids are taken as they are."""
    seams = backbone.seams(system if isinstance(system, str) else None)
    return anchor_of(backbone, anchor_ids(backbone, system), seams.tail, seams.reopen)


def anchor_ids(backbone: Backbone, system: str | torch.Tensor | Sequence[int] | None) -> torch.Tensor:
    """Token ids ``[tokens]`` a window under this system prompt begins with; nothing is prefilled.

    Without a processor, None is an anchor of no tokens and text raises ProcessorRequired.
    """
    if system is not None and not isinstance(system, str):
        return torch.as_tensor(system).to(device="cpu", dtype=torch.int64, copy=True).reshape(-1)
    prefix, template = backbone.seams(system).prefix, backbone.builder.format
    if template is None and not prefix:
        return torch.empty(0, dtype=torch.int64)
    # without a template the tokenizer's own BOS opens the sequence
    return backbone.tokenize(prefix, special=template is None or not template.has_template)


def anchor_of(backbone: Backbone, ids: torch.Tensor, tail: str, reopen: str) -> Anchor:
    """The anchor of given token ids, prefilled."""
    positions = backbone.positions([ids], [{}])
    kv: KV = backbone.no_kv()
    if ids.shape[0]:
        kv, _ = backbone.prefill(Encoded(ids, {}, {}), positions)
        kv = kv_map(kv, lambda t: t.detach().clone())
    return Anchor(ids, positions, kv, tensor_digest(ids), tail, reopen)
