"""What a model's KV permits: channels that mean the same at every position, and where its sinks are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kamera.content import Encoded
from kamera.engines import LiveKV, Span
from kamera.engines.hf import Backbone, HfEngine
from kamera.ops import KV, LayerKV, kv_slice, relocate_kv

SINK = 32
"""First tokens whose share of the attention is measured (Irminsul, 7.1)."""

DISPLACED = 64
"""Tokens by which a body is moved, to see whether attention still finds what stands in front of it."""

Advance = Callable[[int, int], object]
"""Is told how much is done, of how much."""


def roc(
    backbone: Backbone | HfEngine,
    ids: torch.Tensor,
    *,
    blocks: int = 64,
    tokens: int = 16,
    room: int = 4096,
    seed: int = 0,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """The area under the ROC curve of each channel of each layer, over all thresholds of cosine.

    ``blocks`` pieces of ``ids`` ``[tokens]`` stand at five positions of a window of ``room`` tokens, behind
    other text; compared is the KV of their last token. Positives are pairs of one block at two positions,
    negatives as many pairs of two blocks at positions drawn by ``seed`` (Irminsul, section 5). 1.0: equal
    content at two positions is always more alike than unequal content; 0.5: chance; less: it misleads.
    ``as_stored`` compares KV as it is cached, ``moved`` KV that is rotated to one position. Raises ValueError
    for fewer than two blocks, and for text that is too short.
    """
    engine = backbone.engine
    if blocks < 2 or tokens < 1:
        raise ValueError(f"blocks={blocks}, tokens={tokens}: compare two blocks of a token or more")
    places = _places(engine, room, (0, 1 / 8, 1 / 4, 1 / 2, 7 / 8))
    filler, contents = _filler(ids, places[-1], blocks * tokens)
    pieces = contents.split(tokens)
    held: list[list[KV]] = [[] for _ in pieces]  # by block and position, its last token
    moved: list[list[KV]] = [[] for _ in pieces]
    for number, at in enumerate(places):
        live = _live(engine, [_prefill(engine, filler[:at], 0)] if at else [], tokens)
        for block, piece in enumerate(pieces):
            kv = kv_slice(_prefill(engine, piece, at, live), tokens - 1, tokens)
            held[block].append(kv)
            moved[block].append(relocate_kv(kv, engine.layout, (places[-1] - at,) * engine.axes))
            advance(number * blocks + block + 1, len(places) * blocks)
    pairs = _pairs(blocks, len(places), seed)
    rows: list[dict[str, Any]] = []
    for layer, spec in enumerate(engine.layout):
        for channel in spec.channels:
            vectors = ([[kv[layer] for kv in block] for block in kvs] for kvs in (held, moved))
            stored, turned = (_area(one, channel.name, pairs) for one in vectors)
            row = {"layer": layer, "channel": channel.name, "phased": channel.rope is not None}
            rows.append({**row, "as_stored": stored, "moved": turned})
    means = []
    for name in dict.fromkeys(row["channel"] for row in rows):
        own = [row for row in rows if row["channel"] == name]
        mean = {kind: sum(row[kind] for row in own) / len(own) for kind in ("as_stored", "moved")}
        means.append({"channel": name, "phased": own[0]["phased"], **mean})
    return {"blocks": blocks, "tokens": tokens, "positions": places, "channels": means, "layers": rows}


def sink(
    backbone: Backbone | HfEngine,
    ids: torch.Tensor,
    *,
    chunk: int = 128,
    room: int = 1024,
    samples: int = 4,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Where the attention of a chunk goes, by the position that the chunk stands at.

    ``W`` is the share of its attention within the chunk that its own first 32 tokens take, ``S`` the share of
    all its attention that the first 32 tokens of the prompt take (Irminsul, 7.1 and appendix A); means over
    heads, the chunk's tokens from the 32nd on and ``samples`` pieces of ``ids`` ``[tokens]``, then over
    layers, with their deviation. ``S_moved`` is S if all between the prompt's first 32 tokens and the chunk
    was computed 64 positions further on and rotated back, ``S_stored`` if it was not rotated. Raises
    ValueError for a chunk of at most 32 tokens and for text that is too short, UnsupportedBackbone for a
    model that does not tell its attention.
    """
    engine = backbone.engine
    if chunk <= SINK or samples < 1:
        raise ValueError(f"chunk={chunk}, samples={samples}: a chunk has more than {SINK} tokens")
    places = sorted({SINK, *_places(engine, room, (0, 1 / 8, 1 / 4, 1 / 2, 7 / 8))})
    places = [at for at in places if at == 0 or at >= SINK]
    longest = places[-1]
    sums: dict[tuple[int, str], list[torch.Tensor]] = {}
    step = max(1, (len(ids) - longest - DISPLACED - chunk) // samples)
    for number in range(samples):
        filler, body = _filler(ids[number * step :], longest + DISPLACED, chunk)
        for count, at in enumerate(places):
            front = _prefill(engine, filler[:at], 0) if at else None
            masses = _masses(engine, body, at, [front] if front is not None else [])
            if front is not None and at > SINK:
                head, rest = kv_slice(front, 0, SINK), _displaced(engine, filler, at)
                turned = relocate_kv(rest, engine.layout, (-DISPLACED,) * engine.axes)
                masses["S_moved"] = _masses(engine, body, at, [head, turned])["S"]
                masses["S_stored"] = _masses(engine, body, at, [head, rest])["S"]
            for name, by_layer in masses.items():
                sums.setdefault((at, name), []).append(by_layer)
            advance(number * len(places) + count + 1, samples * len(places))
    layers = {key: torch.stack(values).mean(0) for key, values in sums.items()}
    rows = []
    for at in places:
        means = {name: layers.get((at, name)) for name in ("W", "S", "S_moved", "S_stored")}
        row = {name: None if mass is None else float(mass.mean()) for name, mass in means.items()}
        spread = {f"{name}_deviation": float(layers[at, name].std(unbiased=False)) for name in ("W", "S")}
        rows.append({"position": at, **row, **spread})
    return {"sink": SINK, "chunk": chunk, "samples": samples, "rows": rows}


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """The share of pairs in which a positive exceeds a negative; ties count half."""
    scores = torch.tensor([*positives, *negatives], dtype=torch.float64)
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[inverse]  # ties share their mean rank
    n, m = len(positives), len(negatives)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


Pair = tuple[int, int, int, int]
"""Block and position of one vector, block and position of the other."""


def _pairs(blocks: int, places: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    equal = [(b, p, b, q) for b in range(blocks) for p in range(places) for q in range(p)]
    other = [(a, draw(places), (a + 1 + draw(blocks - 1)) % blocks, draw(places)) for a, *_ in equal]
    return equal, other


def _area(kvs: Sequence[Sequence[LayerKV]], name: str, pairs: tuple[list[Pair], list[Pair]]) -> float:
    rows = torch.stack([torch.stack([kv[name].double().flatten() for kv in block]) for block in kvs])
    rows = torch.nn.functional.normalize(rows, dim=-1)
    scores = []
    for kind in pairs:
        a, p, b, q = torch.tensor(kind).T
        scores.append((rows[a, p] * rows[b, q]).sum(-1).tolist())
    return auc(*scores)


def _masses(engine: HfEngine, body: torch.Tensor, at: int, front: Sequence[KV]) -> dict[str, torch.Tensor]:
    """W and S of each layer, ``[layers]``, of a chunk at ``at`` behind KV that stands where it was shown."""
    live = _live(engine, front, len(body))
    by_layer: dict[str, list[torch.Tensor]] = {"W": [], "S": []}
    for weights in engine.attention(body, _positions(engine, at, len(body)), live):
        rows = weights[:, SINK:].double()
        own = rows[..., at:]
        by_layer["W"].append((own[..., :SINK].sum(-1) / own.sum(-1)).mean())
        by_layer["S"].append(rows[..., :SINK].sum(-1).mean())
    return {name: torch.stack(values).cpu() for name, values in by_layer.items()}


def _displaced(engine: HfEngine, filler: torch.Tensor, at: int) -> KV:
    """KV of the tokens from `SINK` to ``at``, computed `DISPLACED` positions further on, behind more text."""
    text = torch.cat([filler[:SINK], filler[at : at + DISPLACED], filler[SINK:at]])
    return kv_slice(_prefill(engine, text, 0), SINK + DISPLACED, len(text))


def _filler(ids: torch.Tensor, before: int, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``before`` tokens, and the ``least`` behind them. Raises ValueError if there are fewer."""
    if len(ids) < before + least:
        raise ValueError(
            f"the trace has {len(ids)} tokens of text, {before + least} are needed: give a longer one, or "
            "fewer positions, blocks or samples"
        )
    return ids[:before], ids[before : before + least]


def _places(engine: HfEngine, room: int, shares: Sequence[float]) -> list[int]:
    most = min(room, engine.limits.last)
    return sorted({int(share * most) for share in shares})


def _positions(engine: HfEngine, at: int, count: int) -> torch.Tensor:
    return engine.positions([torch.zeros(at + count, dtype=torch.int64)], [{}])[:, at:]


def _prefill(engine: HfEngine, ids: torch.Tensor, at: int, behind: LiveKV | None = None) -> KV:
    return engine.prefill([Encoded(ids)], [_positions(engine, at, len(ids))], behind)[0]


def _live(engine: HfEngine, kvs: Sequence[KV], room: int) -> LiveKV:
    """A live KV that shows ``kvs`` one after another, where they are."""
    live = engine.live()
    live.show([Span(kv, None, (0,) * engine.axes) for kv in kvs], room=room)
    return live
