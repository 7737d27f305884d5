"""The plain model, for a conversation that no window can hold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from kamera.engines import Engine
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


def plain_answer(
    backbone: Engine, inputs: Mapping[str, torch.Tensor], reason: Exception, **options: Any
) -> tuple[str, TurnReport]:
    """Answer a whole prompt with the report.

    Its forwards and tokens are those of prompt and answer together.
    """
    started = time.perf_counter()
    with backbone.measure() as work:
        tokens = backbone.plain.generate(inputs, **options)[0]
    length = int(inputs["input_ids"].shape[1])
    report = TurnReport(
        prefilled=length,
        forwards=work.forwards,
        tokens_recomputed=work.tokens,
        vision_encodes=work.vision_encodes,
        seconds=time.perf_counter() - started,
        guarantee="exact",
        mode="forget",
        uncached=f"{type(reason).__name__}: {reason}",
    )
    return backbone.builder.detokenize(tokens) or "", report
