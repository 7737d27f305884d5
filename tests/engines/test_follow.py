"""`Engine.ask` after every token against one question for each beginning of the text."""

from __future__ import annotations

import pytest
import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.engines.hf import engine as module
from tests.engines.compare import relative
from tests.models import samples, tiny
from tests.window.rig import watching


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", "kimi_k25", "llava", "gemma3", "qwen2_5_omni"],  # the last gives logits after all tokens
)
def test_following_a_text_equals_asking_each_beginning(family):
    backbone = tiny.backbone(family)
    chunk = samples.chunk(backbone, samples.sample(family, 3), "p")
    text = torch.tensor([9, 10, 11, 12, 9])
    encoded = backbone.encode(chunk)
    places = backbone.positions([encoded.input_ids, text], [encoded.position_inputs, {}])
    first, after = places.split([chunk.num_tokens, 5], dim=1)
    (kv,) = backbone.prefill([encoded], [first])
    live = backbone.live()
    live.show([Span(kv, None, (0,) * backbone.axes)], room=5)
    other = torch.tensor([12, 11, 9])
    with watching(backbone) as seen:
        followed = backbone.ask([text, other, text[:1]], after, live, every=True)
    assert seen.forwards == 1
    assert [len(logits) for logits in followed] == [5, 3, 1]
    for ids, logits in zip([text, other, text[:1]], followed, strict=True):
        for n in range(1, len(ids) + 1):
            (asked,) = backbone.ask([ids[:n]], after[:, :n], live)
            assert asked.shape[0] == 1 and relative(logits[n - 1], asked[0]) <= 1e-5


def test_texts_behind_more_kv_than_rows_may_copy_are_followed_one_after_another(monkeypatch):
    backbone = tiny.backbone("llava")
    live = backbone.live()
    (kv,) = backbone.prefill(*given(backbone))
    live.show([Span(kv, None, (0,))], room=5)
    texts, places = [torch.tensor([9, 10]), torch.tensor([11, 12])], torch.tensor([[3, 4]])
    together = backbone.ask(texts, places, live, every=True)
    monkeypatch.setattr(module, "_ROWS_BYTES", 1)
    with watching(backbone) as seen:
        apart = backbone.ask(texts, places, live, every=True)
    assert seen.forwards == 2
    assert max(map(relative, together, apart)) <= 1e-5


def given(backbone):
    return [Encoded(torch.tensor([5, 6, 7]), {}, {})], [torch.tensor([[0, 1, 2]])]
