"""A few tokens of chunks run among others, and the rest completed: against prefills, and layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kamera.engines import Sampling, Span
from kamera.errors import UnsupportedBackbone
from kamera.ops import Completion, Design, kv_concat, kv_of, token_kernel
from lab.recompute import recompute
from tests.engines.compare import encoded, offset_between, positions, text, worst
from tests.lab.test_recompute import BIDIRECTIONAL, GQA, MLA, SERVED, case
from tests.models.tiny import backbone as tiny


def whole_completion(c) -> Completion:
    """All tokens are rows: nothing is left to complete."""
    tokens = c.span.num_tokens
    return Completion(torch.arange(tokens), torch.eye(tokens), c.place)


def live_of(backbone, *spans):
    live = backbone.live()
    live.show([Span(kv, None, offset) for kv, offset in spans])
    return live


def sampled(c, completion: Completion):
    still = (0,) * c.backbone.axes
    live = live_of(c.backbone, (c.context, still), (c.blind, still))
    with c.backbone.measure() as work:
        (made,) = c.backbone.sample([Sampling(c.span, c.place, 1, completion)], live)
    assert (work.forwards, work.tokens) == (1, len(completion.rows))
    return made


@pytest.mark.parametrize("name", SERVED)
def test_all_rows_equal_a_prefill_in_context(name):
    c = case(name)
    assert worst(sampled(c, whole_completion(c)), c.conditioned) <= 1e-5


@pytest.mark.parametrize("name", SERVED)
def test_what_a_forward_completes_equals_one_forward_a_layer(name):
    c = case(name)
    design = Design.of(token_kernel(c.blind, c.backbone.layout, c.place))
    completion = design.completion(c.span.num_tokens // 3, c.place)
    assert worst(sampled(c, completion), by_layers(c, completion)) <= 1e-4
    assert worst(sampled(c, completion), c.blind) > 1e-3


def by_layers(c, completion: Completion):
    """One forward for each layer, whose result is completed by hand before the next."""
    held = list(kv_of([dict(layer) for layer in c.blind], c.backbone.groups))
    for index, spec in enumerate(c.backbone.layout):
        now = kv_of(held, c.backbone.groups)
        fresh = recompute(c.backbone, c.span, c.place, c.context, now, completion.rows).kv[index]
        held[index] = {
            channel.name: completed_by_hand(
                channel, held[index][channel.name], fresh[channel.name], completion
            )
            for channel in spec.channels
        }
    return kv_of(held, c.backbone.groups)


def completed_by_hand(channel, base, fresh, completion):
    """Kernel ridge regression of the rows' changes, each token turned to position 0 as complex numbers."""
    rows, tokens = completion.rows.numpy(), base.shape[1]
    columns = completion.columns.double().numpy()
    turned_base, turned_fresh = (at_zero(x, channel, completion.positions) for x in (base, fresh))
    change = np.concatenate([(turned_fresh - turned_base)[:, t].reshape(1, -1) for t in rows])
    best = None
    for ridge in (1e-3, 1e-2, 1e-1):
        square = columns[rows] + ridge * np.eye(len(rows))
        missed = 0.0
        for i in range(len(rows)):  # leaves each row out in turn
            rest = [j for j in range(len(rows)) if j != i]
            guess = columns[rows[i], rest] @ np.linalg.solve(square[np.ix_(rest, rest)], change[rest])
            missed += ((guess - change[i]) ** 2).sum()
        if best is None or missed < best[0]:
            best = missed, columns @ np.linalg.solve(square, change)
    heads, _, dim = base.shape
    whole = turned_base + best[1].reshape(tokens, heads, dim).transpose(1, 0, 2)
    out = at_zero(torch.from_numpy(whole), channel, -completion.positions)
    out[:, rows] = fresh.numpy()[:, rows]
    return torch.from_numpy(out).float()


def at_zero(x, channel, places):
    x = x.double().numpy().copy()
    if channel.rope is None:
        return x
    rope, start = channel.rope, channel.rotary_start
    half = len(rope.inv_freq)
    for pair, (frequency, axis) in enumerate(zip(rope.inv_freq, rope.axes, strict=True)):
        a, b = (pair, pair + half) if rope.pairing == "half" else (2 * pair, 2 * pair + 1)
        number = (x[..., start + a] + 1j * x[..., start + b]) * np.exp(-1j * frequency * places[axis].numpy())
        x[..., start + a], x[..., start + b] = number.real, number.imag
    return x


@pytest.mark.parametrize("name", [GQA, MLA])
def test_chunks_that_run_whole_and_in_part_share_a_forward(name):
    b = tiny(name)
    first, glue, second, last = encoded(b, name, 1), text(5), encoded(b, name, 2), encoded(b, name, 3)
    places = positions(b, first, glue, second, last)
    spans = (first, glue, second, last)
    live = b.live()
    true = b.prefill(spans, places, live)
    homes = [positions(b, span)[0] for span in (second, last)]
    alone = [b.prefill([span], [home])[0] for span, home in zip((second, last), homes, strict=True)]
    still = (0,) * b.axes
    shown = [(true[0], still)]
    shown += [(kv, offset_between(h, p)) for kv, h, p in zip(alone, homes, places[2:], strict=True)]
    parts = [
        Sampling(glue, places[1], 1),
        Sampling(second, places[2], 1, all_of(second, places[2])),
        Sampling(last, places[3], 2, all_of(last, places[3])),
    ]
    with b.measure() as work:
        made = b.sample(parts, live_of(b, *shown))
    assert (work.forwards, work.tokens) == (1, sum(s.num_tokens for s in spans[1:]))
    assert worst(kv_concat(made), kv_concat(true[1:])) <= 1e-5
    # a span that stands between two that run is attended to as it is
    parts = [parts[0], parts[2]]
    made = b.sample(parts, live_of(b, *shown))
    assert worst(made[0], true[1]) <= 1e-5
    assert worst(made[1], true[3]) > 1e-4


def all_of(span, place) -> Completion:
    return Completion(torch.arange(span.num_tokens), torch.eye(span.num_tokens), place)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_pictures_whose_tokens_see_each_other_are_refused(name):
    b = tiny(name)
    span = encoded(b, name)
    assert not b.form(span).samples
    assert b.form(text(4)).samples
    (place,) = positions(b, span)
    (kv,) = b.prefill([span], [place])
    with pytest.raises(UnsupportedBackbone, match="see each other"):
        b.sample([Sampling(span, place, 0, all_of(span, place))], live_of(b, (kv, (0,) * b.axes)))
