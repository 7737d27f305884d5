"""The plain model, for a conversation that no window can hold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from kamera.engines.hf import Backbone
from kamera.errors import (
    NotRelocatable,
    NotSegmentable,
    PolicyRefused,
    UnsafeText,
    UnsupportedBackbone,
    WindowFull,
)
from kamera.sessions.turn import TurnReport

UNCACHEABLE = (NotSegmentable, UnsafeText, WindowFull, NotRelocatable, PolicyRefused, UnsupportedBackbone)
"""Errors for prompts that the model itself accepts, and for a model of which no KV can be used again."""

Inputs = Mapping[str, torch.Tensor]


def plain_logits(backbone: Backbone, inputs: Inputs) -> torch.Tensor:
    """Logits ``[vocabulary]`` after a whole prompt."""
    with backbone.alone(), torch.no_grad():
        logits: torch.Tensor = backbone.model(**_taken(backbone, inputs)).logits[0, -1]
    return logits


def plain_answer(
    backbone: Backbone, inputs: Inputs, reason: Exception, **options: Any
) -> tuple[str, TurnReport]:
    """Answer a whole prompt by ``generate`` of transformers, with the report.

    Its forwards and tokens are those of prompt and answer together.
    """
    taken = _taken(backbone, inputs)
    started = time.perf_counter()
    with backbone.alone(), torch.no_grad(), backbone.measure() as work:
        out = backbone.model.generate(**taken, **options)  # type: ignore[operator]
    tokens = (out if isinstance(out, torch.Tensor) else out.sequences)[0]
    length = int(taken["input_ids"].shape[1])
    report = TurnReport(
        kept=0,
        turned=0,
        patched=0,
        prefilled=length,
        left=0,
        forwards=work.forwards,
        tokens_recomputed=work.tokens,
        vision_encodes=work.vision_encodes,
        seconds=time.perf_counter() - started,
        guarantee="exact",
        mode="forget",
        uncached=f"{type(reason).__name__}: {reason}",
    )
    return backbone.detokenize(tokens[length:].cpu()) or "", report


def _taken(backbone: Backbone, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The processor's output without arguments that the model's forward lacks, on its device."""
    accepted = set(backbone.builder.accepted)
    return {name: value.to(backbone.device) for name, value in inputs.items() if name in accepted}
