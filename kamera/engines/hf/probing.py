"""A probe forward: a fixed text, a fixed picture if the model takes one, and a few logits of the answer.

It detects changes that no digest can: a function patched under its own name, a kernel that computes wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from kamera.content import Encoded
from kamera.engines.hf.meter import uncounted
from kamera.errors import KameraError

if TYPE_CHECKING:
    from kamera.engines.hf.backbone import Backbone

Answers = dict[str, list[float]]
"""A few logits, by question: "text", and "picture" if the processor takes one."""

_LOGITS = 16
_TOKENS = 12
_SIDE = 56  # pixels


def probe_answers(backbone: Backbone) -> Answers:
    """Run the probe; its forwards are not counted as work."""
    answers: Answers = uncounted(lambda: _answers(backbone))
    return answers


def tolerance(backbone: Backbone, dtype: torch.dtype) -> float:
    """Largest difference between runs of one model on two machines, as a share of the logits' norm.

    Half precision rounds at 2^-8, and a router that flips sends a token to another expert.
    """
    from kamera.engines.hf.batch import has_experts

    if dtype in (torch.float32, torch.float64):
        return 5e-3
    return 0.5 if has_experts(backbone.decoder) else 0.1


def _answers(backbone: Backbone) -> Answers:
    size = backbone.model.get_input_embeddings().weight.shape[0]
    special = backbone.builder.vision_tokens
    ids = (torch.arange(_TOKENS) * 7919 + 3) % size
    ids = torch.tensor([0 if int(i) in special else int(i) for i in ids])
    found = {"text": _asked(backbone, [Encoded(ids[:-2], {}, {})], ids[-2:])}
    shown = _picture(backbone)
    if shown is not None:
        found["picture"] = _asked(backbone, [shown], ids[-2:])
    return found


def _picture(backbone: Backbone) -> Encoded | None:
    """A colourful square, encoded; None if the model cannot be shown one."""
    prompt = backbone.builder.format
    if prompt is None or not (prompt.takes_images and backbone.builder.takes_pixels):
        return None
    ramp = np.arange(_SIDE * _SIDE * 3, dtype=np.uint64) * 2654435761 % 251
    picture = Image.fromarray(ramp.astype(np.uint8).reshape(_SIDE, _SIDE, 3))
    try:
        return backbone.encode(backbone.chunk(picture))
    except (KameraError, ValueError):  # a processor that wants other pictures
        return None


def _asked(backbone: Backbone, spans: list[Encoded], question: torch.Tensor) -> list[float]:
    ids = [s.input_ids for s in spans]
    places = backbone.positions([*ids, question], [*[s.position_inputs for s in spans], {}])
    cache, start = backbone.cache([]), 0
    for span in spans:
        stop = start + span.num_tokens
        _, cache = backbone.run(span, places[:, start:stop], cache)
        start = stop
    logits = backbone.forward(question, places[:, start:], cache).float().cpu()
    chosen = torch.linspace(0, logits.shape[0] - 1, _LOGITS).long()
    return [float(x) for x in logits[chosen]]
