"""Certificates written by hand: what a probe would have found, without running one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera import Backbone, Certificate, ReusePolicy
from kamera.window.certificate import Estimate, library_versions


def certificate(backbone: Backbone, of_rank: int, **changes: Any) -> Certificate:
    """A certificate that lets ``backbone`` serve patches of a rank, but for ``changes``."""
    made = Certificate(
        fingerprint=backbone.fingerprint,
        model="tiny",
        versions=library_versions(),
        rank=of_rank,
        patch_bytes=ReusePolicy.patch_bytes,
        probe="by hand",
        probe_digest="0" * 64,
        n=100,
        chance=0.1,
        reprefill=Estimate(0.9, 0.85, 0.95),
        blind=Estimate(0.2, 0.15, 0.25),
        patched=Estimate(0.9, 0.85, 0.95),
        eta=Estimate(0.99, 0.98, 1.0),
        flip_recover=Estimate(0.99, 0.95, 1.0),
        verdict="safe",
        reason="made by hand",
        created="2026-01-01T00:00:00+00:00",
    )
    return replace(made, **changes)


def reseal(path: Path, **changes: Any) -> None:
    """Edit a certificate's fields in its file and give it the digest that fits, as a forger would."""
    document = json.loads(path.read_text())
    document["certificate"] |= changes
    body = json.dumps(document["certificate"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**document, "sha256": hashlib.sha256(body.encode()).hexdigest()}))
