"""Certificates written by hand: what a probe would have found, without running one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera import Certificate, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.ops import PatchBudget
from kamera.trust import Estimate, Finding, Guarantee, Verdict
from kamera.window import grounds_of


def finding(verdict: Verdict = "safe", reason: str = "made by hand") -> Finding:
    """What 100 questions might have shown."""
    return Finding(
        verdict=verdict,
        reason=reason,
        n=100,
        chance=0.1,
        reprefill=Estimate(0.9, 0.85, 0.95),
        blind=Estimate(0.2, 0.15, 0.25),
        served=Estimate(0.9, 0.85, 0.95),
        eta=Estimate(0.99, 0.98, 1.0),
        flip_recover=Estimate(0.99, 0.95, 1.0),
    )


ALL_SAFE: dict[Guarantee, Finding] = {g: finding() for g in ("patched", "orbit", "survivor", "near")}


def certificate(backbone: HfEngine, of_rank: int, **changes: Any) -> Certificate:
    """A certificate that lets ``backbone`` serve all KV with patches of a rank, but for ``changes``."""
    made = Certificate(
        model="tiny",
        grounds=grounds_of(backbone, PatchBudget(of_rank, ReusePolicy.patch_bytes)),
        probe="by hand",
        probe_digest="0" * 64,
        divergence=0.5,
        findings=ALL_SAFE,
        sabotages={"no rotation": finding("unsafe", "it was seen")},
        created="2026-01-01T00:00:00+00:00",
    )
    return replace(made, **changes)


def but(guarantee: Guarantee, verdict: Verdict, reason: str) -> dict[Guarantee, Finding]:
    """All safe, except for one."""
    return {**ALL_SAFE, guarantee: finding(verdict, reason)}


def none_safe(verdict: Verdict, reason: str) -> dict[Guarantee, Finding]:
    """All of this verdict."""
    return dict.fromkeys(ALL_SAFE, finding(verdict, reason))


def reseal(path: Path, **changes: Any) -> None:
    """Edit a certificate's fields in its file and give it the digest that fits, as a forger would."""
    document = json.loads(path.read_text())
    document["certificate"] |= changes
    body = json.dumps(document["certificate"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**document, "sha256": hashlib.sha256(body.encode()).hexdigest()}))
