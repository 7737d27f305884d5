"""The probe: a fixed text, or a picture and a text, in two small forwards; a few logits and features of it.

It detects changes that no digest can: a kernel that computes wrongly, a write that no witness saw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig

from kamera.content import Chunk, Encoded
from kamera.engines.hf import forwards
from kamera.engines.hf.hooks import probing
from kamera.engines.hf.model import Model
from kamera.engines.values import FEATURES, Answers
from kamera.errors import KameraError
from kamera.store import answers_apart

_LOGITS = 16
_TOKENS = 12
_SIDE = 56  # pixels
_STEADY = 0.02
"""Largest distance between two answers in one process, as a share of `tolerance`: rounding hardly varies."""


class Prober:
    """Asks a model the probe; its own first answers under a fingerprint are what later ones must equal."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._first: dict[str, Answers] = {}
        self._picture: tuple[str, Chunk] | None = None

    def answers_now(self) -> Answers:
        """Its answers now, in two forwards that are not counted as work."""
        with probing():  # as later work it gives way, so it holds nothing that a call waits for
            return self._ask()

    def compare(self, fingerprint: str, now: Answers) -> tuple[Answers, str]:
        """The first answers under a fingerprint, and how those of ``now`` differ from them."""
        first = self._first.setdefault(fingerprint, now)
        limit = tolerance(self._model) * _STEADY
        for name in sorted(first.keys() & now.keys()):
            distance = answers_apart(first[name], now[name])
            if not distance <= limit:
                return first, (
                    f"backbone {fingerprint[:12]} answers the {name} probe otherwise than before (relative "
                    f"distance {distance:.1e}, tolerance {limit:.0e}), and nothing that can be digested "
                    "differs: undo what was patched, or make a new Backbone of a model loaded anew"
                )
        return first, ""

    def _ask(self) -> Answers:
        model = self._model
        special = {*model.builder.vision_tokens, *_marks(model.model.config)}
        ids = (torch.arange(_TOKENS) * 7919 + 3) % model.builder.token_count
        ids = torch.tensor([0 if int(i) in special else int(i) for i in ids])
        picture = self._encode_picture()
        if picture is None:
            return {"text": _probe_logits(model, Encoded(ids[:-2], {}, {}), ids[-2:])}
        features = [t.float().cpu().reshape(-1) for _, t in sorted(picture.tensors.items())]
        answers = {"picture": _probe_logits(model, picture, ids)}
        return answers | ({FEATURES: _few(torch.cat(features))} if features else {})

    def _encode_picture(self) -> Encoded | None:
        """A colourful square, encoded; None if the model cannot be shown one."""
        model = self._model
        prompt = model.builder.format
        if prompt is None or not ("image" in prompt.kinds and model.builder.takes_pixels):
            return None
        try:
            if self._picture is None or self._picture[0] != model.fingerprint:
                ramp = np.arange(_SIDE * _SIDE * 3, dtype=np.uint64) * 2654435761 % 251
                picture = Image.fromarray(ramp.astype(np.uint8).reshape(_SIDE, _SIDE, 3))
                self._picture = (model.fingerprint, model.chunk(picture))
            return model.encode(self._picture[1])
        except (KameraError, ValueError):  # a processor that wants other pictures
            return None


def tolerance(model: Model) -> float:
    """Largest difference between runs of one model on two machines, as a share of the logits' norm.

    Half precision rounds at 2^-8, and a router that flips sends a token to another expert.
    """
    if model.dtype in (torch.float32, torch.float64):
        return 5e-3
    return 0.5 if model.routes else 0.1


def _marks(config: Any) -> set[int]:
    """Ids of tokens that a config and its parts name: some of them stand for media, or open it."""
    settings = vars(config)
    own = {v for k, v in settings.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    return own.union(*(_marks(part) for part in settings.values() if isinstance(part, PreTrainedConfig)))


def _probe_logits(model: Model, span: Encoded, question: torch.Tensor) -> list[float]:
    """A few logits after a span and a question, in a forward each."""
    ids, inputs = [span.input_ids, question], [span.position_inputs, {}]
    places, length = model.positions(ids, inputs), span.num_tokens
    _, cache = forwards.run(model, span, places[:, :length])
    return _few(forwards.forward(model, question, places[:, length:], cache).float().cpu())


def _few(values: torch.Tensor) -> list[float]:
    places = torch.linspace(0, values.shape[0] - 1, _LOGITS, dtype=torch.float32).long()
    return [float(x) for x in values[places]]
