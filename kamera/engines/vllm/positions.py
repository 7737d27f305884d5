"""Positions as vLLM counts them, asked of vLLM's own model class before anything is in a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

_TEXT = 3  # tokens of text before, between and behind pictures under test


class Positions:
    """Positions of prompts under one model configuration of vLLM; no weights are loaded.

    The model class walks a whole prompt to count it. A scheduler needs the positions of a few tokens alone.
    They follow from the gap that each picture leaves, and the class is asked for it once per picture size.
    """

    def __init__(self, config: Any) -> None:
        self._model: Any = None
        self._gaps: dict[tuple[int, ...], int | None] = {}
        if config.uses_mrope:
            from vllm.model_executor.model_loader.utils import get_model_architecture

            kind, _ = get_model_architecture(config)
            self._model = kind.__new__(kind)  # what counts positions reads the configuration alone
            self._model.__dict__["config"] = config.hf_config

    def of(self, request: Any) -> torch.Tensor:
        """Positions of a request's prompt, int64 ``[axes, tokens]``."""
        return self._count(list(request.prompt_token_ids or ()), request.mm_features)

    def lows(self, request: Any, starts: Sequence[int]) -> list[tuple[int, ...]]:
        """The lowest position on each axis of parts of a prompt that begin at the tokens ``starts``."""
        if self._model is None:
            return [(start,) for start in starts]
        found, pictures, at, gap = list[tuple[int, ...]](), request.mm_features, 0, 0
        for start in starts:
            while at < len(pictures) and pictures[at].mm_position.offset < start:
                more, place = self._gap(pictures[at]), pictures[at].mm_position
                if more is None or place.offset + place.length > start:
                    whole, ends = self.of(request), [*starts[1:], None]
                    return [tuple(whole[:, a:b].amin(1).tolist()) for a, b in zip(starts, ends, strict=True)]
                gap, at = gap + more, at + 1
            found.append((start + gap,) * 3)
        return found

    # -- inside --------------------------------------------------------------------------------

    def _count(self, ids: list[int], pictures: Sequence[Any]) -> torch.Tensor:
        if self._model is None:
            return torch.arange(len(ids))[None]
        positions, _ = self._model.get_mrope_input_positions(ids, pictures)
        return torch.as_tensor(positions, dtype=torch.int64)

    def _gap(self, picture: Any) -> int | None:
        """How far a picture sets back the text behind it; None for what is counted in another way."""
        grid = None if picture.data is None else picture.data.get("image_grid_thw")
        if grid is None:
            return None
        length = picture.mm_position.length
        size = (length, *grid.data.flatten().tolist())
        if size not in self._gaps:
            self._gaps[size] = self._try(picture, length)
        return self._gaps[size]

    def _try(self, picture: Any, length: int) -> int | None:
        """`_gap` by two such pictures in one prompt; None unless both set back all axes alike."""
        starts = [_TEXT, 2 * _TEXT + length]
        both = [replace(picture, mm_position=replace(picture.mm_position, offset=at)) for at in starts]
        tokens = 3 * _TEXT + 2 * length
        places = self._count([0] * tokens, both)
        gap = int(places[0, -1]) + 1 - tokens
        lows = torch.stack([part.amin(1) for part in places.split([_TEXT, length] * 2 + [_TEXT], dim=1)])
        begun = torch.tensor([0, *starts, _TEXT + length, tokens - _TEXT]).sort().values
        wanted = begun + torch.tensor([0, 0, gap // 2, gap // 2, gap])
        return gap // 2 if torch.equal(lows, wanted[:, None].expand(-1, 3)) else None
