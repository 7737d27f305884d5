"""Spans of one form in one forward: each row is that span alone behind the past, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.engines.hf import forwards
from tests.engines.compare import encoded, text, worst
from tests.models import samples, tiny

ANCHOR = samples.text_ids(4)
BATCHED = (
    "qwen2_vl",  # three axes of positions
    "qwen3_vl",  # DeepStack: features of all rows' pictures, one behind the other
    "llava",  # MHA
    "minicpm3",  # MLA, dense
    "mistral_sliding",
    "gemma4_shared",  # layers without a KV of their own
)


def placed(backbone, spans):
    """The anchor's KV, and the spans' positions right behind it."""
    kv, _ = forwards.run(backbone, Encoded(ANCHOR), backbone.positions([ANCHOR], [{}]))
    ids = [(ANCHOR, s.input_ids) for s in spans]
    inputs = [({}, s.position_inputs) for s in spans]
    places = [backbone.positions(i, p)[:, len(ANCHOR) :] for i, p in zip(ids, inputs, strict=True)]
    return kv, places


@pytest.mark.few(2)
@pytest.mark.parametrize("family", BATCHED)
def test_a_row_is_the_span_alone(family):
    backbone = tiny.backbone(family)
    spans = [encoded(backbone, family, seed) for seed in range(3)]
    anchor, places = placed(backbone, spans)
    # not at one place: positions are each row's own
    places[1] = places[1] + 3
    alone = [
        forwards.run(backbone, span, where, forwards.make_cache(backbone, [anchor]))[0]
        for span, where in zip(spans, places, strict=True)
    ]
    live = backbone.live()
    live.show([Span(anchor, None, (0,) * backbone.axes)])
    with backbone.measure() as work:
        rows = backbone.prefill(spans, places, live, apart=True)
    assert (work.forwards, work.tokens) == (1, 3 * spans[0].num_tokens)
    assert max(worst(row, want) for row, want in zip(rows, alone, strict=True)) <= 1e-5
    assert worst(rows[0], alone[2]) > 1e-3  # rows differ, so an exchange of two would show


@pytest.mark.parametrize("family", ["kimi_k25", "qwen3_vl_moe", "deepseek_v32"])
def test_a_decoder_with_experts_takes_no_batch(family):
    backbone = tiny.backbone(family)
    spans = [text(5, 1), text(5, 2)]
    assert [backbone.form(span) for span in spans] == [None, None]
    where = torch.arange(5).expand(backbone.axes, -1)
    with pytest.raises(ValueError, match="cannot share a forward"):
        backbone.prefill(spans, [where, where], apart=True)
