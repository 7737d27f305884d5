"""Measure the readers of each channel of a cache on a live model: `lab.weighted.Readers` from gradients.

The answer's divergence from the re-prefill's is differentiated with respect to the chunk's own KV, at
points on the way from the canonical to the conditioned copy. One number then covers everything between a
cached feature and the answer (the queries of its head group, the output projection, MLA's up-projections,
the layers above), on every attention family, and channels of all layers come out in one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange

from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import encode as encoding
from kamera.ops import KV, Blocks, Deltas, check_kv, kv_map, relocate_kv
from lab.weighted import Readers

PATH = (0.0, 0.25, 0.5, 0.75)
"""Shares of the deficit at which the readers are measured. At 1 nothing diverges and nothing is learned."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One chunk behind its antecedents, and questions that read it.

    ``context`` is the KV of everything before the chunk, in place; ``canonical`` the chunk's own,
    ``offset`` (one entry per axis) away from its place here; ``delta`` its deficit in the canonical frame.
    ``questions`` are text token ids ``[tokens]``, of one length, at ``positions`` ``[axes, tokens]``.
    """

    context: KV
    canonical: KV
    delta: Deltas
    offset: Sequence[int]
    questions: Sequence[torch.Tensor]
    positions: torch.Tensor


def measure_readers(backbone: HfEngine, readings: Iterable[Reading], *, seed: int = 0) -> Readers:
    """Second moments of the gradient of the questions' answers by the chunk's KV, over all ``readings``.

    One forward and one backward of the questions per reading and point of `PATH`, and one forward for the
    re-prefill's own answers. The model's weights get no gradients. A channel that no gradient reaches (the
    indexer keys of sparse attention only choose) counts as unread. Same seed, same readers. Raises
    ValueError without readings, or for one without questions.
    """
    generator = torch.Generator().manual_seed(seed)
    total = [
        {c.name: torch.zeros(c.heads, c.dim, c.dim, dtype=torch.float64) for c in spec.channels}
        for spec in backbone.layout
    ]
    asked = 0
    for reading in readings:
        if not reading.questions:
            raise ValueError(f"reading {asked} has no questions: what reads the chunk cannot be measured")
        check_kv(reading.canonical, backbone.layout)
        with torch.no_grad(), backbone.turns.alone():
            truth = _log_answers(backbone, reading, _on_the_way(reading, 1.0))
        for share in PATH:
            leaves = kv_map(_on_the_way(reading, share), lambda t: t.detach().requires_grad_())
            with torch.enable_grad(), backbone.turns.alone():
                said = _log_answers(backbone, reading, leaves)
                divergence = (said.exp() * (said - truth)).sum(-1)
                # random signs: in the mean, gradients of different questions do not mix
                signs = torch.randint(0, 2, divergence.shape, generator=generator) * 2 - 1
                _accumulate(total, leaves, (divergence * signs.to(divergence.device)).sum())
        asked += len(PATH) * len(reading.questions)
    if not asked:
        raise ValueError("no readings: give at least one chunk behind its antecedents, with questions")
    return Readers(tuple({name: m / asked for name, m in layer.items()} for layer in total))


def _on_the_way(reading: Reading, share: float) -> KV:
    """canonical + ``share`` of the deficit, in the canonical frame."""

    def there(tensor: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        step = rearrange(
            delta.to(tensor.device),
            "layers tokens (heads dim) -> layers heads tokens dim",
            heads=tensor.shape[1],
        )
        return (tensor.to(step.dtype) + share * step).to(tensor.dtype)

    return Blocks(
        [
            {name: there(tensor, delta[name]) for name, tensor in block.items()}
            for block, delta in zip(reading.canonical.parts, reading.delta.parts, strict=True)
        ],
        reading.canonical.groups,
    )


def _log_answers(backbone: HfEngine, reading: Reading, kv: KV) -> torch.Tensor:
    """Log-probabilities ``[questions, vocabulary]`` of the token after each question."""
    live = relocate_kv(kv, backbone.layout, reading.offset)
    ids = torch.stack(list(reading.questions))
    places = encoding.with_batch(reading.positions)
    places = places.expand(*places.shape[:-2], ids.shape[0], -1)
    out = backbone.model(
        input_ids=ids.to(backbone.model.device),
        position_ids=places.to(backbone.model.device),
        past_key_values=model_cache.share_rows(
            forwards.make_cache(backbone, [reading.context, live]), ids.shape[0]
        ),
        use_cache=True,
        logits_to_keep=1,
    )
    logits = out.logits[:, -1]
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)


def _accumulate(total: list[dict[str, torch.Tensor]], leaves: KV, loss: torch.Tensor) -> None:
    flat = [
        (layers, name, leaf)
        for block, layers in zip(leaves.parts, leaves.groups, strict=True)
        for name, leaf in block.items()
    ]
    gradients = torch.autograd.grad(loss, [leaf for *_, leaf in flat], allow_unused=True)
    for (layers, name, _), gradient in zip(flat, gradients, strict=True):
        if gradient is not None:
            wide = gradient.to(device="cpu", dtype=torch.float64)
            for layer, moment in zip(layers, wide.mT @ wide, strict=True):
                total[layer][name] += moment
