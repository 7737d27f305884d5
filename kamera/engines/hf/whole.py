"""The plain model over a whole prompt, for one that no window can hold: nothing is cut or reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kamera.engines.hf.model import Model


def logits_after(model: Model, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits ``[vocabulary]`` after a prompt."""
    with model.alone(), torch.no_grad():
        logits: torch.Tensor = model.model(**_taken(model, inputs)).logits[0, -1]
    return logits


def tokens_after(
    model: Model, inputs: Mapping[str, torch.Tensor], sampling: Mapping[str, Any]
) -> torch.Tensor:
    """New tokens ``[sequences, new]`` after a prompt, by ``generate`` of transformers, on the CPU."""
    taken = _taken(model, inputs)
    with model.alone(), torch.no_grad():
        out = model.model.generate(**taken, **sampling)
    tokens = out if isinstance(out, torch.Tensor) else out.sequences
    return tokens[:, taken["input_ids"].shape[1] :].cpu()


def _taken(model: Model, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The processor's output without arguments that the model's forward lacks, on its device."""
    accepted = set(model.builder.accepted)
    return {name: value.to(model.device) for name, value in inputs.items() if name in accepted}
