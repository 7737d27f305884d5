"""Anchors of prompts that are given as token ids, read from the model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kamera.content import LandmarkReader


def anchors_of(model: Any, ids: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    """Positions in ``ids`` ``[tokens]`` where messages start, and where pictures and clips start and end.

    ``model`` is a backbone, or its processor or tokenizer. They are the ``anchors`` of a `Prompt`, and are
    borders of the segments that the same conversation has as messages. A template that opens turns with
    words, not with a token of its own, gives no starts of messages. Raises ProcessorRequired without a
    template.
    """
    processor = model.processor if callable(getattr(model, "prefill", None)) else model
    return LandmarkReader(processor).of(torch.as_tensor(ids).tolist()).borders
