"""Positions as vLLM counts them, asked of vLLM's own model class before anything is in a page."""

from __future__ import annotations

from typing import Any

import torch

from kamera.errors import IncompatibleChunk


class Positions:
    """Positions of prompts under one model configuration of vLLM; no weights are loaded."""

    def __init__(self, config: Any) -> None:
        self._model: Any = None
        if config.uses_mrope:
            from vllm.model_executor.model_loader.utils import get_model_architecture

            kind, _ = get_model_architecture(config)
            self._model = kind.__new__(kind)  # what counts positions reads the configuration alone
            self._model.__dict__["config"] = config.hf_config

    def of(self, request: Any) -> torch.Tensor:
        """Positions of a request's prompt, int64 ``[axes, tokens]``.

        Raises IncompatibleChunk for a picture whose size vLLM does not tell.
        """
        ids = list(request.prompt_token_ids or ())
        if self._model is None:
            return torch.arange(len(ids))[None]
        try:
            positions, _ = self._model.get_mrope_input_positions(ids, request.mm_features)
        except (AttributeError, LookupError, TypeError) as error:  # features without their grids
            raise IncompatibleChunk("a prompt with a picture of unknown size: send its pixels") from error
        return torch.as_tensor(positions, dtype=torch.int64)
