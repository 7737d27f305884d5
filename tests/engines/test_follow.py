"""`Engine.follow` against one question for each beginning of the text."""

from __future__ import annotations

import pytest
import torch

from kamera.engines import Span
from tests.engines.compare import relative
from tests.models import samples, tiny


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25", "llava", "gemma3"])
def test_following_a_text_equals_asking_each_beginning(family):
    backbone = tiny.backbone(family)
    chunk = samples.chunk(backbone, samples.sample(family, 3), "p")
    text = torch.tensor([9, 10, 11, 12, 9])
    encoded = backbone.encode(chunk)
    places = backbone.positions([encoded.input_ids, text], [encoded.position_inputs, {}])
    first, after = places.split([chunk.num_tokens, 5], dim=1)
    kv = backbone.prefill(encoded, first)
    live = backbone.live()
    live.show([Span(kv, None, (0,) * backbone.axes)], room=5)
    followed = backbone.follow(text, after, live)
    assert followed.shape[0] == 5
    for n in range(1, 6):
        asked = backbone.ask(text[:n], after[:, :n], live)
        assert relative(followed[n - 1], asked) <= 1e-5
