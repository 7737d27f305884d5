"""A model as transformers runs it, on whole prompts: without reuse, and without a cache of Kamera's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kamera.engines.hf.encode import input_device
from kamera.engines.hf.forwards import new_tokens
from kamera.engines.hf.model import Model


class TransformersModel:
    """The `PlainModel` of an `HfEngine`. Inputs that the model's forward lacks are left out."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with self._model.turns.alone(), torch.no_grad():
            logits: torch.Tensor = self._model.model(**self._accept(inputs)).logits[0, -1]
        return logits

    def generate(self, inputs: Mapping[str, torch.Tensor], **sampling: Any) -> torch.Tensor:
        with self._model.turns.alone(), torch.no_grad():
            out = self._model.model.generate(**self._accept(inputs), **sampling)
        return new_tokens(out, inputs["input_ids"].shape[1])

    def _accept(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = inputs.keys() & {*self._model.builder.accepted}
        return {name: inputs[name].to(input_device(self._model.model)) for name in names}
