"""Collects judged arms and measured numbers over windows, and makes rows with intervals of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kamera.certify.metrics import Items, bootstrap, eta_interval
from kamera.trust import Estimate
from lab.metrics import flip_recover
from lab.paper.trial import Judged

Setting = Mapping[str, str | int]
_Key = tuple[str, str, tuple[tuple[str, str | int], ...]]

MULTI, ONE = "multi-hop", "one-hop"


@dataclass(frozen=True)
class Row:
    """An arm in one setting of one table; questions of one kind.

    η and flip-recover are taken against ``base``. ``share`` is stored bytes over the chunk's own KV
    bytes, as both are held here (fp32), ``share_bf16`` what it would be with KV and floats in bf16.
    """

    section: str
    setting: Setting
    arm: str
    kind: str
    base: str
    n: int
    accuracy: Estimate
    kl: Estimate
    eta: Estimate
    flip_recover: Estimate
    agreement: Estimate
    nbytes: float
    share: float
    share_bf16: float
    tokens: float
    forwards: float


@dataclass(frozen=True)
class Number:
    """A measured number that is no arm's, averaged over windows."""

    section: str
    setting: Setting
    name: str
    n: int
    value: Estimate


@dataclass
class _Group:
    base: str
    judged: list[Judged] = field(default_factory=list)
    against: list[Judged] = field(default_factory=list)


class Tally:
    """Everything measured on one family so far."""

    def __init__(self) -> None:
        self._groups: dict[_Key, _Group] = {}
        self._numbers: dict[_Key, list[float]] = {}

    def add(
        self,
        section: str,
        arm: str,
        judged: Judged,
        against: Judged,
        *,
        base: str = "blind",
        **setting: str | int,
    ) -> None:
        """An arm's answers in one window, and those of the ``base`` its η is taken against."""
        if judged.kl.shape != against.kl.shape:
            # an arm that answers multi-hop questions only: they stand first in every window
            against = _first(against, len(judged.kl))
        group = self._groups.setdefault((section, arm, tuple(setting.items())), _Group(base))
        group.judged.append(judged)
        group.against.append(against)

    def note(self, section: str, name: str, value: float, **setting: str | int) -> None:
        """A number measured in one window."""
        self._numbers.setdefault((section, name, tuple(setting.items())), []).append(float(value))

    def questions(self, section: str) -> int:
        """The fewest multi-hop questions any arm of a section has answered."""
        counts = [
            sum(int((j.hops > 1).sum()) for j in group.judged)
            for (name, _, _), group in self._groups.items()
            if name == section
        ]
        return min(counts, default=0)

    def rows(self, by_hops: Collection[str] = ()) -> Iterator[Row]:
        """All arms: multi-hop questions pooled, and the one-hop control.

        In the sections ``by_hops`` also each number of hops.
        """
        for (section, arm, setting), group in self._groups.items():
            ours, base = _joined(group.judged), _joined(group.against)
            hops = ours["hops"]
            multi = sorted({int(h) for h in hops if h > 1})
            kinds = {MULTI: hops > 1}
            if section in by_hops and len(multi) > 1:
                kinds |= {f"{h} hops": hops == h for h in multi}
            kinds[ONE] = hops == 1
            for kind, chosen in kinds.items():
                if chosen.any():
                    yield _row(section, arm, dict(setting), kind, group, ours, base, chosen)

    def numbers(self) -> Iterator[Number]:
        """All measured numbers."""
        for (section, name, setting), values in self._numbers.items():
            known = [v for v in values if not np.isnan(v)]
            yield Number(section, dict(setting), name, len(known), bootstrap(known))


def _first(judged: Judged, count: int) -> Judged:
    cut = {name: getattr(judged, name)[:count] for name in ("right", "agree", "kl", "hops")}
    return replace(judged, **cut)


def _joined(judged: Sequence[Judged]) -> dict[str, Items]:
    return {
        name: np.concatenate([getattr(j, name) for j in judged]) for name in ("right", "agree", "kl", "hops")
    }


def _row(
    section: str,
    arm: str,
    setting: Setting,
    kind: str,
    group: _Group,
    ours: dict[str, Items],
    base: dict[str, Items],
    chosen: np.ndarray,
) -> Row:
    kl, agree = ours["kl"][chosen], ours["agree"][chosen]
    return Row(
        section,
        setting,
        arm,
        kind,
        group.base,
        int(chosen.sum()),
        bootstrap(ours["right"][chosen].tolist()),
        bootstrap(kl.tolist()),
        eta_interval(kl, base["kl"][chosen]),
        flip_recover(agree, base["agree"][chosen]),
        bootstrap(agree.tolist()),
        *(float(np.mean([getattr(j, n) for j in group.judged])) for n in _PRICES),
    )


_PRICES = ("nbytes", "share", "share_bf16", "tokens", "forwards")
