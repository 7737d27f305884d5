"""The rivals on whole windows: every unit behind the first is repaired behind what was served before it.

`lab.baselines` repairs one chunk behind exact antecedents, at matched bytes. Here nothing before a unit is
exact but the first unit, and a budget is a share of the tokens, as the methods' papers state it. These
are arms of ``kamera eval … --arm-module lab.baselines.windows``, and of `lab.streaming`.

| arm | serves |
|---|---|
| ``cacheblend@15%`` | the tokens that deviate most recomputed, fewer in deeper layers (arXiv:2405.16444) |
| ``vlcache@2%``, ``vlcache@5%`` | first tokens recomputed, more in sensitive layers (arXiv:2512.12977) |
| ``conduit@10%`` | a tenth of the tokens recomputed at every layer: those that deviate most at the first |
| ``first-k@10%`` | the first tokens recomputed (EPIC, MPIC) |
| ``sink@10%`` | four first and the last tokens recomputed (after StreamingLLM) |
| ``recent@4`` | the last four units prefilled anew, all others dropped |
| ``streaming_vlm`` | units that stay keep their KV, closed up; others are prefilled where they stand |

CONDUIT's own choice of tokens is not published in what we have: the share is its, the choice is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kamera.engines import Span
from kamera.eval.adapter import Unit
from kamera.eval.arms import Blind, Exact, Maker
from kamera.eval.desk import Desk, PlacedKV, Placing
from kamera.ops import KV, LayerKV, kv_bytes, kv_concat, kv_of, relocate_kv
from lab.baselines.cacheblend import SLOPE
from lab.baselines.deviation import deviation, highest
from lab.baselines.sink import SINKS
from lab.recompute import Keep, recompute


class Mixed(Blind):
    """Canonicals of which some tokens are recomputed in context; a subclass says which (`mixed`)."""

    def __init__(self, desk: Desk, percent: int) -> None:
        super().__init__(desk)
        self.share = percent / 100

    def encode(self, unit: Unit) -> None:
        """Encode the unit; a live one inside the context is refused."""
        unit.check_reusable()
        super().encode(unit)

    @property
    def live_layers(self) -> list[int]:
        """Layers whose KV can differ behind other units: all that keep KV, but the first."""
        return [i for i, spec in enumerate(self.desk.backbone.layout) if i and spec.channels]

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """One partial forward for each unit but the first."""
        blind = super().spans(order)
        served = blind[:1]
        context = [self.desk.anchor.kv, *(_moved(self.desk, span) for span in served)]
        for name, positions, span in list(zip(order, self.desk.places(order), blind, strict=True))[1:]:
            kv = self.mixed(name, positions, kv_concat(context), _moved(self.desk, span))
            context.append(kv)
            served.append(self.desk.still(kv))
        return served

    def mixed(self, name: str, positions: torch.Tensor, context: KV, blind: KV) -> KV:
        """``blind``, the unit's canonical at its place, with tokens recomputed behind ``context``."""
        raise NotImplementedError

    def recompute(
        self,
        name: str,
        positions: torch.Tensor,
        context: KV,
        blind: KV,
        rows: torch.Tensor,
        keep: Keep | None = None,
    ) -> tuple[KV, tuple[torch.Tensor, ...]]:
        """`lab.recompute.recompute`; its forward is counted, its tokens are not yet."""
        encoded = self.desk.facts[name].encoded
        made = recompute(self.desk.backbone, encoded, positions, context, blind, rows, keep=keep)
        self.forwards += 1
        return made.kv, made.rows


class FirstK(Mixed):
    """The first tokens, at every layer."""

    def mixed(self, name: str, positions: torch.Tensor, context: KV, blind: KV) -> KV:
        """The share's tokens, from the head."""
        rows = self.chosen(positions.shape[1])
        self.recomputed += rows.numel()
        return self.recompute(name, positions, context, blind, rows)[0]

    def chosen(self, tokens: int) -> torch.Tensor:
        """Tokens that are recomputed."""
        return torch.arange(round(self.share * tokens))


class Sink(FirstK):
    """Four first tokens, the rest of the share at the tail."""

    def chosen(self, tokens: int) -> torch.Tensor:
        """Head and tail."""
        count = round(self.share * tokens)
        head = min(SINKS, count)
        return torch.cat([torch.arange(head), torch.arange(tokens - (count - head), tokens)])


class CacheBlend(Mixed):
    """Tokens that deviate most at the check layer; each deeper layer drops a few more."""

    slope = SLOPE

    def mixed(self, name: str, positions: torch.Tensor, context: KV, blind: KV) -> KV:
        """The check layer is the first that can deviate; it is computed for all tokens."""
        tokens, live, layers = positions.shape[1], self.live_layers, len(self.desk.backbone.layout)
        counts = {}
        for step, layer in enumerate(live):
            above = 1 + self.slope * (1 - 2 * step / max(1, len(live) - 1))
            counts[layer] = min(tokens, round(self.share * tokens * above))

        def keep(layer: int, rows: torch.Tensor, fresh: LayerKV, held: LayerKV) -> torch.Tensor:
            if layer < live[0]:
                return rows
            return rows[highest(deviation(fresh, held), min(counts[layer], rows.numel()))]

        kv, rows = self.recompute(name, positions, context, blind, torch.arange(tokens), keep)
        # a layer computes what the layer before it kept
        computed = [tokens] * (live[0] + 1) + [rows[i].numel() for i in live[:-1]]
        self.recomputed += sum(computed) / layers
        return kv


class Conduit(CacheBlend):
    """One set of tokens at every layer, chosen where the check layer deviates most."""

    slope = 0.0


class VLCache(Mixed):
    """First tokens, layer by layer as many as a profile says.

    The profile is each layer's deviation of the second unit seen behind the first, measured off the clock.
    """

    def encode(self, unit: Unit) -> None:
        """Profile the layers once there are two units."""
        super().encode(unit)
        names = list(self.desk.facts)
        if "vlcache" not in self.desk.prepared and len(names) > 1:
            self.desk.prepared["vlcache"] = self._profile(names[0], names[1])

    def _profile(self, before: str, name: str) -> list[float]:
        first, second = self.desk.places([before, name])
        behind = [self.desk.move(before, self.desk.canonical(before), first)]
        true = self.desk.prefill(name, second, self.live, behind)
        blind = _moved(self.desk, self.desk.move(name, self.desk.canonical(name), second))
        return [float(deviation(t, b).sum()) if b else 0.0 for t, b in zip(true.kv, blind, strict=True)]

    def mixed(self, name: str, positions: torch.Tensor, context: KV, blind: KV) -> KV:
        """The longest head runs through all layers; each layer serves the head that it earns."""
        tokens, live = positions.shape[1], self.live_layers
        weights = self.desk.prepared["vlcache"]
        total = sum(weights[i] for i in live)
        counts = [0] * len(weights)
        for i in live:
            earned = weights[i] / total if total else 1 / len(live)
            counts[i] = min(tokens, round(self.share * tokens * len(live) * earned))
        kv, _ = self.recompute(name, positions, context, blind, torch.arange(max(counts)))
        self.recomputed += max(counts)
        mixed = [
            {n: torch.cat([new[n][:, :count], old[n][:, count:]], dim=1) for n in old}
            for new, old, count in zip(kv, blind, counts, strict=True)
        ]
        return kv_of(mixed, kv.groups)


class Recent(Exact):
    """The last ``count`` units alone, prefilled anew."""

    def __init__(self, desk: Desk, count: int) -> None:
        super().__init__(desk)
        self.count = count

    def place(self, order: Sequence[str]) -> None:
        """Drop all but the last."""
        super().place(order[-self.count :])

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """One forward per unit: nothing is stored."""
        return self.extend(order, [])


class StreamingVLM(Placing):
    """Units that stay keep the KV they were first computed with, closed up; what has left is lost."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._held: dict[str, PlacedKV] = {}

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """Move what stood in the last window; prefill the others behind what stands before them."""
        held: dict[str, PlacedKV] = {}
        spans: list[Span] = []
        for name, positions in zip(order, self.desk.places(order), strict=True):
            held[name] = self._held.get(name) or self._prefilled(name, positions, spans)
            spans.append(self.desk.move(name, held[name], positions))
        self._held, self.kept = held, sum(kv_bytes(one.kv) for one in held.values())
        return spans

    def _prefilled(self, name: str, positions: torch.Tensor, behind: Sequence[Span]) -> PlacedKV:
        self.recomputed, self.forwards = self.recomputed + self.desk.tokens([name]), self.forwards + 1
        return self.desk.prefill(name, positions, self.live, behind)


def _moved(desk: Desk, span: Span) -> KV:
    return relocate_kv(span.kv, desk.backbone.layout, span.offset)


_SHARES: tuple[tuple[type[Mixed], str, int], ...] = (
    (CacheBlend, "cacheblend", 15),
    (VLCache, "vlcache", 2),
    (VLCache, "vlcache", 5),
    (Conduit, "conduit", 10),
    (FirstK, "first-k", 10),
    (Sink, "sink", 10),
)
ARMS: dict[str, Maker] = {
    **{f"{kind}@{percent}%": partial(cls, percent=percent) for cls, kind, percent in _SHARES},
    "recent@4": partial(Recent, count=4),
    "streaming_vlm": StreamingVLM,
}
"""Arms by name, for ``--arm-module``."""
