"""One function for each claim of the paper: the measured value in words, and whether it agrees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lab.paper import basis, depth, envelope, frontier, modality, recall, refresh, reorder, survivors
from lab.paper.deficit import NAME as DEFICIT
from lab.paper.document import View
from lab.paper.draw import RANK
from lab.paper.tally import MULTI, ONE
from lab.testbed.directories import UNLED


class Verdict(NamedTuple):
    """A measured value in words; None where the paper gives no value to hold it against."""

    text: str
    agrees: bool | None


def _eta(view: View, section: str, arm: str, **setting: str | int) -> float:
    return view.mean(section, arm, "eta", **setting)


def _accuracy(view: View, arm: str, kind: str = MULTI, /, **setting: str | int) -> float:
    return view.mean(frontier.NAME, arm, "accuracy", kind, **setting)


def _numbers(view: View, section: str, name: str) -> list[tuple[Mapping[str, Any], list[float]]]:
    """What a view has, or KeyError: no verdict without a measurement."""
    found = view.numbers(section, name)
    if not found:
        raise KeyError(f"{view.name}: no {section} {name}")
    return found


# -- the gap ---------------------------------------------------------------------------------------


def gap(view: View) -> Verdict:
    full = view.row(frontier.NAME, "reprefill")["accuracy"]
    blind = view.row(frontier.NAME, "blind")["accuracy"]
    return Verdict(f"{full[0]:.2f} → {blind[0]:.2f}", blind[2] < full[1])


def one_hop(view: View) -> Verdict:
    full, blind = (_accuracy(view, arm, ONE) for arm in ("reprefill", "blind"))
    return Verdict(f"{full:.2f} → {blind:.2f}", abs(full - blind) <= 0.02)


def mask(view: View) -> Verdict:
    value = _eta(view, frontier.NAME, "mask")
    return Verdict(f"η {value:.3f}", abs(value) <= 0.05)


# -- its shape -------------------------------------------------------------------------------------


def by_depth(view: View) -> Verdict:
    # a layer whose norm is rounding has no rank
    ranked = {int(setting["layer"]) for setting, _ in _numbers(view, DEFICIT, "rank for 90 %")}
    norms: dict[int, list[float]] = {}
    for setting, value in _numbers(view, DEFICIT, "relative norm"):
        norms.setdefault(int(setting["layer"]), []).append(value[0])
    live = [max(norms[layer]) for layer in sorted(ranked)]
    return Verdict(f"{live[0]:.2f} → {live[-1]:.2f}", live[-1] >= 2 * live[0])


def low_rank(view: View) -> Verdict:
    worst = max(value[0] for _, value in _numbers(view, DEFICIT, "rank for 90 % over tokens"))
    return Verdict(f"at most {worst:.2f}", worst <= 0.30)


def saturates(view: View) -> Verdict:
    best = _eta(view, frontier.NAME, "patch", rank=frontier.HIGHEST)
    enough = (r for r in frontier.RANKS if _eta(view, frontier.NAME, "patch", rank=r) >= 0.94 * best)
    rank = next(enough, frontier.HIGHEST)
    return Verdict(f"rank {rank}", 16 <= rank <= 64)


def diffuse(view: View) -> Verdict:
    ((_, value),) = _numbers(view, DEFICIT, "share of tokens for 90 %")
    return Verdict(f"{value[0]:.2f} of the tokens", value[0] >= 0.5)


# -- the repair ------------------------------------------------------------------------------------


def rank_64(view: View) -> Verdict:
    value = _eta(view, frontier.NAME, "patch", rank=64)
    return Verdict(f"η {value:.3f}", value >= 0.85)


def ceiling_bytes(view: View) -> Verdict:
    ceiling = _accuracy(view, "reprefill")
    for rank in frontier.RANKS:
        if _accuracy(view, "patch", rank=rank) >= ceiling - 0.02:
            share = view.mean(frontier.NAME, "patch", "share", rank=rank)
            return Verdict(f"{share:.1%} (rank {rank})", share <= 0.25)
    return Verdict(f"not by rank {frontier.RANKS[-1]}", False)


def above(*rivals: str) -> Callable[[View], Verdict]:
    def judge(view: View) -> Verdict:
        beaten = []
        for rank in frontier.RANKS:
            ours = _eta(view, frontier.NAME, "patch", rank=rank)
            beaten += [
                f"{rival}@{rank} {theirs:.2f} over {ours:.2f}"
                for rival in rivals
                if (theirs := _eta(view, frontier.NAME, rival, rank=rank)) > ours + 0.005
            ]
        return Verdict("at every budget" if not beaten else "; ".join(beaten), not beaten)

    return judge


def rivals_at(rank: int) -> Callable[[View], Verdict]:
    def judge(view: View) -> Verdict:
        named = ("sink", "first-k", "cacheblend", "vlcache")
        values = [_eta(view, frontier.NAME, arm, rank=rank) for arm in named]
        return Verdict(f"η {min(values):.2f} to {max(values):.2f}", max(values) <= 0.71)

    return judge


def low_rank_k(view: View) -> Verdict:
    best = max(_eta(view, frontier.NAME, "low-rank-k", rank=rank) for rank in frontier.RANKS)
    return Verdict(f"η at most {best:.2f}", best <= 0.05)


def flips(view: View) -> Verdict:
    ours = view.mean(frontier.NAME, "patch", "flip_recover", rank=RANK)
    named = ("sink", "first-k", "cacheblend", "vlcache")
    theirs = max(view.mean(frontier.NAME, arm, "flip_recover", rank=RANK) for arm in named)
    return Verdict(f"{ours:.2f} against {theirs:.2f}", ours >= 0.9 and theirs <= 0.5)


def layers(view: View) -> Verdict:
    goal = _eta(view, frontier.NAME, "patch", rank=RANK) - 0.01
    for row in view.rows(frontier.NAME):
        if row["arm"] == "layers" and row["eta"] and row["eta"][0] >= goal:
            percent = row["setting"]["percent"]
            return Verdict(f"{percent} %", percent >= 80)
    view.row(frontier.NAME, "layers", percent=100 // view.family["layers"])
    return Verdict("all of them", True)


# -- the window operations -------------------------------------------------------------------------


def orbit(view: View) -> Verdict:
    pairs = {
        k: (_eta(view, reorder.NAME, "orbit", K=k), _eta(view, reorder.NAME, "exact", K=k)) for k in (3, 4, 6)
    }
    text = ", ".join(f"{o:.2f} / {e:.2f}" for o, e in pairs.values())
    return Verdict(text, all(o >= e - 0.11 for o, e in pairs.values()))


def order_share(view: View) -> Verdict:
    found = _numbers(view, reorder.NAME, reorder.ORDER)
    return Verdict(
        ", ".join(f"{v[0]:.2f}" for _, v in found),
        all(v[1] <= 0.53 and v[2] >= 0.43 for _, v in found),
    )


_STALE = {"gqa": -0.68, "deepstack": -2.85, "mla": 0.29}


def stale(view: View) -> Verdict:
    value = _eta(view, recall.NAME, "stale", replaced=3)
    paper = _STALE.get(view.name.removesuffix(UNLED))
    if paper is None:
        return Verdict(f"{value:.2f}", None)
    return Verdict(f"{value:.2f} (paper {paper:.2f})", (value < 0) == (paper < 0))


def decays(view: View) -> Verdict:
    values = [_eta(view, recall.NAME, "stale", replaced=t) for t in range(4)]
    steady = all(b <= a + 0.02 for a, b in itertools.pairwise(values))
    return Verdict(" → ".join(f"{v:.2f}" for v in values), steady)


def fresh(view: View) -> Verdict:
    value = _eta(view, recall.NAME, "fresh", replaced=3)
    return Verdict(f"η {value:.3f}", value >= 0.81)


def keep(view: View) -> Verdict:
    value = view.mean(survivors.NAME, "keep", "kl")
    sensitive = view.name.removesuffix(UNLED) == "deepstack"
    return Verdict(f"KL {value:.3f}", value > 0.05 if sensitive else value <= 0.05)


def removal(view: View) -> Verdict:
    value = _eta(view, survivors.NAME, "removal", rank=RANK)
    return (
        Verdict("keeping loses nothing", None)
        if math.isnan(value)
        else Verdict(f"{value:.2f}", value >= 0.82)
    )


def bound(view: View) -> Verdict:
    kl, blind = (view.mean(survivors.BOUND, arm, "kl") for arm in ("keep", "blind"))
    ((_, old),) = _numbers(view, survivors.BOUND, survivors.OLD)
    return Verdict(f"KL {kl:.2f} (blind {blind:.2f}), {old[0]:.0%} old answers", kl <= 0.12)


def drift(name: str, agrees: Callable[[float, float], bool]) -> Callable[[View], Verdict]:
    def judge(view: View) -> Verdict:
        stale = _eta(view, envelope.NAME, "stale", drift=name)
        rebuilt = _eta(view, envelope.NAME, "rebuilt", drift=name)
        return Verdict(f"{stale:.2f} (rebuilt {rebuilt:.2f})", agrees(stale, rebuilt))

    return judge


def distractors(view: View) -> Verdict:
    values = [_eta(view, envelope.SUPERSET, "stale", distractors=d) for d in range(4)]
    return Verdict(" → ".join(f"{v:.2f}" for v in values), values[-1] <= 0.5)


def rebuilt(view: View) -> Verdict:
    values = [_eta(view, envelope.SUPERSET, "rebuilt", distractors=d) for d in range(4)]
    return Verdict(f"at least {min(values):.2f}", min(values) >= 0.9)


def update(view: View) -> Verdict:
    lacks = [
        _eta(view, refresh.NAME, "rebuilt", swapped=d)
        - _eta(view, refresh.NAME, "update", swapped=d, rank=RANK)
        for d in range(4)
    ]
    return Verdict(f"at most {max(0.0, *lacks):.3f} behind", max(lacks) <= 0.06)


def deep_half(view: View) -> Verdict:
    layers = view.family["layers"]
    half = _eta(view, depth.NAME, "deepest", layers=layers // 2)
    full = _eta(view, depth.NAME, "deepest", layers=layers - 1)
    return Verdict(f"{half:.2f} of {full:.2f}", half >= 0.95 * full)


def single(view: View) -> Verdict:
    values = [_eta(view, depth.NAME, "one layer", layer=i) for i in range(1, view.family["layers"])]
    return Verdict(
        f"{values[0]:.2f} shallow, {values[-1]:.2f} deep, best {max(values):.2f}", values[-1] >= 0.9
    )


def shared_basis(view: View) -> Verdict:
    own, pooled = (_eta(view, basis.NAME, arm, rank=RANK) for arm in ("own", "pooled"))
    return Verdict(f"{pooled:.3f} against {own:.3f}", pooled >= own - 0.05)


def text(view: View) -> Verdict:
    full, blind = (view.mean(modality.NAME, arm, "accuracy", window="text") for arm in ("reprefill", "blind"))
    # a backbone that cannot answer the text itself has nothing to lose
    return Verdict(f"{full:.2f} → {blind:.2f}", abs(full - blind) <= 0.05 if full >= 0.5 else None)
