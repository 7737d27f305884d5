"""Measure a backbone: what each guarantee loses against a re-prefill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kamera import __version__, testbed
from kamera.certify import material
from kamera.certify.metrics import bootstrap, eta_interval
from kamera.certify.trials import Judged, Trial
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import ProcessorRequired, quote
from kamera.trust import GUARANTEES, CertifyReport, Guarantee, Losses, ReusePolicy

MEASURED: tuple[Guarantee, ...] = ("patched", "orbit", "survivor", "near", "blind")
"""Guarantees that can be measured; "blind" always is, since η is relative to it."""

DEFAULT: tuple[Guarantee, ...] = ("patched", "orbit", "survivor", "blind")
"""Those that are measured unless others are asked for."""

Measured = tuple[Guarantee, float | None, Judged]
"""What one document says of one way of serving it: the guarantee, the share departed, the tokens."""

DOCUMENTS = 12
"""Documents that are read by default."""


def certify(
    backbone: Backbone | HfEngine,
    files: Sequence[str | Path] = (),
    *,
    questions: Sequence[str] = (),
    documents: int = DOCUMENTS,
    rank: int = ReusePolicy.rank,
    patch_bytes: float | None = ReusePolicy.patch_bytes,
    guarantees: Sequence[Guarantee] = DEFAULT,
    model: str = "",
    bar: tqdm[Any] | None = None,
) -> CertifyReport:
    """Serve the same windows in the way of each guarantee, and hold them against their re-prefill.

    ``files`` are pictures and UTF-8 texts, of which eight (pictures, or passages of a text) make a document,
    or all if there are fewer: the first half leaves, the others stay and are asked about with ``questions``.
    Without files the scenes of the shipped backbone's world are read, or by a model that takes no pictures
    Python's manual. Judged are all tokens of the re-prefill's own answers. ``rank`` and ``patch_bytes`` bound
    the patches; ``bar`` counts documents. Raises ValueError for a caller's mistake, ProcessorRequired without
    a processor, ModalityNotSupported for pictures that the model does not take.
    """
    if unknown := [g for g in guarantees if g not in MEASURED]:
        raise ValueError(f"guarantee {quote(unknown[0])} is none of {', '.join(MEASURED)}")
    if documents < 1:
        raise ValueError(f"documents {documents} must be at least 1")
    if questions and not files:
        raise ValueError("questions are about your own files: give pictures or texts, too")
    engine = backbone.engine
    template = engine.builder.format
    if template is None:
        raise ProcessorRequired("certify reads pictures and texts: load the model with its processor")
    system = None
    if files:
        source = material.own([Path(file) for file in files], questions)
        name = f"{len(files)} of the user's own files"
    elif engine.builder.takes_pixels and "image" in template.kinds:
        source, system, name = material.world(), testbed.SYSTEM, "scenes of the shipped world"
    else:
        source, name = material.prose(), "Python's manual"
    policy = ReusePolicy(rank=rank, patch_bytes=patch_bytes, max_departed=1.0)  # survivors stay what they are
    read: list[list[Measured]] = []
    for document in itertools.islice(source, documents):
        trial = Trial(engine, document, policy, system)
        read.append(
            [(arm.guarantee, arm.departed, trial.judge(arm.window)) for arm in trial.arms(guarantees)]
        )
        if bar is not None:
            bar.update()
    return CertifyReport(
        model=model or type(engine.model).__name__,
        fingerprint=engine.fingerprint,
        dtype=engine.facts.dtype,
        rank=rank,
        patch_bytes=patch_bytes,
        versions={"kamera": __version__} | {name: version(name) for name in ("torch", "transformers")},
        material=name,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        rows=losses(read),
    )


def losses(read: Sequence[Sequence[Measured]]) -> tuple[Losses, ...]:
    """The rows of documents, each of which was served in the same ways, the last of them blind."""
    ways = [*zip(*read, strict=True)]
    blind = [judged.kl for _, _, judged in ways[-1]]
    rows = []
    for way in ways:
        guarantee, gone, _ = way[0]
        kl = [judged.kl for _, _, judged in way]
        eta = eta_interval(kl, blind)
        rows.append(
            Losses(
                guarantee=guarantee,
                departed=None if gone is None else sum(share or 0.0 for _, share, _ in way) / len(way),
                documents=len(way),
                tokens=sum(judged.tokens for _, _, judged in way),
                kl=bootstrap(kl),
                eta=None if math.isnan(eta.mean) else eta,
                flips=bootstrap([judged.flips for _, _, judged in way]),
                kv=bootstrap([judged.kv for _, _, judged in way]),
                alike=bootstrap([judged.alike for _, _, judged in way]),
            )
        )
    return tuple(sorted(rows, key=lambda row: GUARANTEES.index(row.guarantee)))
