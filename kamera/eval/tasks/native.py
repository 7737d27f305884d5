"""The reference without Kamera: the unsplit prompt through the processor and one ``generate``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kamera.content import TOKEN_TYPES
from kamera.engines.hf import Backbone
from kamera.patches import anchor_ids


@dataclass(frozen=True, eq=False)
class Native:
    """An answer, the logits ``[vocabulary]`` of its first token, the prompt's tokens, and seconds."""

    text: str
    logits: torch.Tensor
    tokens: int
    seconds: float


def ask(
    backbone: Backbone,
    contents: Sequence[Mapping[str, Any]],
    question: str,
    system: str | None,
    max_new_tokens: int,
) -> Native:
    """Answer greedily: all contents and the question are one turn, processed and prefilled at once."""
    words = [{"type": "text", "text": question}] if question else []
    turn = backbone.chunk([*map(dict, contents), *words])
    tail = backbone.tokenize(backbone.seams(system).tail)
    ids = torch.cat([anchor_ids(backbone, system), turn.input_ids, tail])
    media = {name: turn.inputs[name] for name in turn.inputs if name not in TOKEN_TYPES}
    # per-token inputs are extended to the whole sequence
    whole = backbone.builder.from_tensors(ids, media, backbone.fingerprint)
    sequence = ids[None].to(backbone.device)
    dtype = next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())
    started = time.perf_counter()
    with torch.no_grad(), backbone.alone():
        made = backbone.model.generate(
            input_ids=sequence,
            attention_mask=torch.ones_like(sequence),
            **{name: _given(name, whole.inputs[name], backbone.device, dtype) for name in whole.inputs},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    seconds = time.perf_counter() - started
    text = backbone.detokenize(made.sequences[0, ids.shape[0] :].cpu()) or ""
    return Native(text, made.logits[0][0].cpu(), turn.num_tokens, seconds)


def _given(name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """An argument of the model: per-token inputs as a batch of one, pixels in the weights' dtype."""
    batched = tensor[None] if name in TOKEN_TYPES else tensor
    return batched.to(device, dtype if tensor.is_floating_point() and "pixel" in name else tensor.dtype)
