"""What the paper says, what was measured, and whether the two agree, by comparisons written down here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lab.paper import frontier
from lab.paper.document import Document, View, views
from lab.paper.draw import RANK
from lab.paper.judges import (
    Verdict,
    above,
    bound,
    by_depth,
    ceiling_bytes,
    decays,
    deep_half,
    diffuse,
    distractors,
    drift,
    flips,
    fresh,
    gap,
    keep,
    layers,
    low_rank,
    low_rank_k,
    mask,
    one_hop,
    orbit,
    order_share,
    rank_64,
    rebuilt,
    removal,
    rivals_at,
    saturates,
    shared_basis,
    single,
    stale,
    text,
    update,
)

WEAK = 0.25
"""A family that re-prefilled answers less than this (chance: 1/16) tells nothing about reuse."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper. ``counts`` says when a measured value agrees with it.

    ``served``: it is about what a patch serves, so a wrong operator should change the verdict. ``differing``:
    it is about antecedents that differ, and says nothing where they are all the same frame.
    """

    name: str
    paper: str
    counts: str
    judge: Callable[[View], Verdict]
    served: bool = False
    differing: bool = False


def judge_all(result: Document) -> list[tuple[Claim, dict[str, Verdict]]]:
    """Every claim against every family."""
    return [(claim, {v.name: judged(claim, v) for v in views(result)}) for claim in CLAIMS]


def too_weak(view: View) -> float | None:
    """The re-prefill's own accuracy where it is near chance: such a backbone binds nothing to lose."""
    try:
        full = view.mean(frontier.NAME, "reprefill", "accuracy")
    except KeyError:
        return None
    return full if full < WEAK else None


def judged(claim: Claim, view: View) -> Verdict:
    """One claim against one family."""
    try:
        verdict = claim.judge(view)
    except KeyError:
        return Verdict("not measured", None)
    return verdict if too_weak(view) is None else Verdict(verdict.text, None)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Blind reuse breaks multi-hop answers",
        "0.74 → 0.38, 0.59 → 0.41 (section 6)",
        "blind's interval lies below re-prefill's",
        gap,
    ),
    Claim("One-hop answers survive it", "0.57 → 0.57 (section 1)", "within 0.02", one_hop),
    Claim(
        "It is conditioning, not position: hiding A from B loses the same",
        "the same loss (section 2)",
        "η of the mask oracle within 0.05 of blind's 0",
        mask,
    ),
    Claim(
        "The deficit grows with depth (relative norm, first live layer → last)",
        "0.08 → 0.49 (section 4)",
        "at least twofold",
        by_depth,
    ),
    Claim(
        "It is low-rank: directions for 90 % of the energy, over tokens",
        "at most 0.30 (table 7)",
        "at most 0.30 in every layer and channel",
        low_rank,
    ),
    Claim("Rank that gives 94 % of what rank 64 gives", "about 32 (C.2)", "16 to 64", saturates, served=True),
    Claim(
        "It is spread over tokens: share that holds 90 % of ‖Δ‖²",
        "an oracle needs about half (section 4)",
        "at least half",
        diffuse,
    ),
    Claim("A rank-64 patch closes the gap", "85–96 % (C.4)", "η at least 0.85", rank_64, served=True),
    Claim(
        "Bytes of the chunk's KV at which accuracy is full (within 0.02)",
        "6 % (rank 16) to 25 % (rank 64)",
        "at most 25 %",
        ceiling_bytes,
        served=True,
    ),
    Claim(
        "Patch above first-k, CacheBlend, VLCache, sink at matched bytes",
        "0.82/0.90 against 0.31/0.41 for first-k (table 6)",
        "no rival more than 0.005 above",
        above("first-k", "cacheblend", "vlcache", "sink"),
        served=True,
    ),
    Claim(
        "Patch above the true-deviation oracle at matched bytes",
        "an oracle needs about half of the tokens (C.3)",
        "never more than 0.005 above",
        above("deviation-oracle"),
        served=True,
    ),
    Claim(
        "Patch above the query-aware oracle at matched bytes",
        "0.82/0.90 against 0.55/0.79 (table 6)",
        "never more than 0.005 above",
        above("query-oracle"),
        served=True,
    ),
    Claim(
        "Token recompute closes a fraction of the gap (largest budget)",
        "10–71 % (section 6)",
        "η at most 0.71",
        rivals_at(frontier.RANKS[-1]),
    ),
    Claim("Low-rank K repairs nothing", "η at most 0 (table 6)", "η at most 0.05", low_rank_k),
    Claim(
        f"Flips restored, patch@{RANK} against the best token baseline",
        "0.96 against 0.21–0.44 (section 6)",
        "at least 0.9 against at most 0.5",
        flips,
        served=True,
    ),
    Claim(
        f"Layers to recompute until patch@{RANK} is matched",
        "86–89 % (C.4)",
        "at least 80 %",
        layers,
        served=True,
    ),
    Claim(
        "Orbit patch ≈ the ordering's own (η, K = 3, 4, 6)",
        "0.92/0.93/0.94 against 0.94; MLA 0.87/0.85/0.83 (section 5)",
        "within 0.11, the paper's widest",
        orbit,
        served=True,
        differing=True,
    ),
    Claim(
        "Order's share of the deficit ‖Δπ−Δid‖/‖Δid‖ (K = 3, 4, 6)",
        "0.43–0.53 (section 5)",
        "intervals reach into that range",
        order_share,
        differing=True,
    ),
    Claim(
        "A stale patch after full turnover",
        "GQA −0.68, deepstack −2.85, MLA +0.29 (section 5)",
        "the same sign",
        stale,
        served=True,
        differing=True,
    ),
    Claim(
        "Stale η falls with turnover (0 to 3 of 3)",
        "steadily (section 5)",
        "never rises by more than 0.02",
        decays,
        served=True,
        differing=True,
    ),
    Claim(
        "A fresh patch on the fixed past", "0.87/0.96/0.81 (section 5)", "η at least 0.81", fresh, served=True
    ),
    Claim(
        "Survivors kept as they are",
        "KL 0.015 GQA, 0.023 MLA; 0.113 deepstack (section 5)",
        "at most 0.05; above it for deepstack",
        keep,
        served=True,
    ),
    Claim(
        "A removal patch wins back what keeping loses",
        "0.82–0.87 (section 5)",
        "at least 0.82",
        removal,
        served=True,
    ),
    Claim(
        "What left has little influence, even on what was read from it",
        "small (section 5)",
        "KL at most 0.12",
        bound,
        served=True,
    ),
    Claim(
        "Envelope: one antecedent duplicated",
        "0.92, as rebuilt (appendix D)",
        "within 0.05 of rebuilt",
        drift("duplicate one", lambda s, r: s >= r - 0.05),
        served=True,
        differing=True,
    ),
    Claim(
        "Envelope: reordered",
        "0.76 (appendix D)",
        "at least 0.7",
        drift("reorder", lambda s, r: s >= 0.7),
        served=True,
        differing=True,
    ),
    Claim(
        "Envelope: one replaced",
        "0.77 (appendix D)",
        "at least 0.7",
        drift("replace one", lambda s, r: s >= 0.7),
        served=True,
        differing=True,
    ),
    Claim(
        "Envelope: all replaced",
        "−3.5 (appendix D)",
        "below 0",
        drift("replace all", lambda s, r: s < 0),
        served=True,
        differing=True,
    ),
    Claim(
        "Stale patch behind 0 to 3 distractors",
        "0.93 → 0.71 → 0.39 → 0.08 (appendix D)",
        "at most 0.5 behind three",
        distractors,
        served=True,
    ),
    Claim(
        "Rebuilt behind 0 to 3 distractors",
        "flat, about 0.92 (appendix D)",
        "at least 0.9",
        rebuilt,
        served=True,
    ),
    Claim(
        f"Rank-{RANK} update of a changed set against a rebuild",
        "0.02–0.06 behind (appendix D)",
        "at most 0.06 behind",
        update,
        differing=True,
    ),
    Claim("Deeper half of the layers against all (η)", "about 95 % (C.3)", "at least 95 %", deep_half),
    Claim("One layer alone", "27 % shallow, 97 % deep (section 4)", "the deepest gives at least 0.9", single),
    Claim(
        "Directions of other items do as well as the item's own",
        "as well (section 4)",
        "η within 0.05",
        shared_basis,
    ),
    Claim("Dense text shows no gap", "none (C.5)", "blind within 0.05 of re-prefill", text),
)


def disagreements(result: Document) -> Mapping[str, list[tuple[Claim, Verdict]]]:
    """Per family, the claims its numbers speak against."""
    found: dict[str, list[tuple[Claim, Verdict]]] = {v.name: [] for v in views(result)}
    for claim, verdicts in judge_all(result):
        for name, verdict in verdicts.items():
            if verdict.agrees is False:
                found[name].append((claim, verdict))
    return found
