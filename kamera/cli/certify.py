"""``kamera certify``: may this model serve reused KV?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kamera.certify import ITEMS, run_probe
from kamera.cli.models import load_backbone
from kamera.cli.options import Device, Dtype, Form, Format, Model, PatchBytes, Precision, Quiet
from kamera.cli.output import Output, facts
from kamera.window import Certificate, ReusePolicy
from kamera.window.certificate import Estimate
from kamera.window.certified import home


class Probe(str, Enum):
    """What is asked: pages of English for models that read, the synthetic world for the shipped ones."""

    pages = "pages"
    world = "world"


def certify(
    model: Model,
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of the patches; the certificate serves policies of this rank.")
    ] = ReusePolicy.rank,
    patch_bytes: PatchBytes = ReusePolicy.patch_bytes or 0.0,
    probe: Annotated[
        Probe | None, typer.Option(help="What is asked (default: pages; world for 'testbed').")
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = ITEMS,
    device: Device = None,
    dtype: Precision = Dtype.auto,
    format: Form = Format.table,
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Directory the certificate goes to (default: KAMERA_CERTIFICATES, or the user's).",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Ask a multi-hop probe of re-prefilled, blind and patched windows, and write a certificate.

    Exit code 0: safe. 1: unsafe, or the probe cannot tell; such a certificate is written too, and serves
    nothing.
    """
    folder = home() if output is None else output
    if folder is None:  # said before the model is loaded
        raise ValueError("this user has no home for a certificate: give --output, or set KAMERA_CERTIFICATES")
    out = Output(format, None, quiet)
    chosen = probe or (Probe.world if model == "testbed" and not Path(model).exists() else Probe.pages)
    backbone = load_backbone(model, device, dtype, show_progress=out.shows_progress)
    with out.progress(items, "question") as bar:
        steps = run_probe(
            backbone, probe=chosen.value, items=items, rank=rank, patch_bytes=patch_bytes or None, model=model
        )
        for step in steps:
            if isinstance(step, Certificate):
                certificate = step
            else:
                bar.update(step[0] - bar.n)
    path = certificate.write(folder)
    out.write({**asdict(certificate), "path": str(path)}, _tables(certificate, path))
    if certificate.verdict != "safe":
        raise typer.Exit(1)


def _tables(certificate: Certificate, path: Path) -> Iterator[Table | str]:
    share = certificate.patch_bytes
    yield facts(
        certificate.model,
        [
            ("fingerprint", certificate.fingerprint),
            ("versions", ", ".join(f"{name} {version}" for name, version in certificate.versions.items())),
            ("rank", certificate.rank),
            ("patch bytes", "as the rank takes" if share is None else f"at most {share:.3g} of the KV's"),
            ("probe", f"{certificate.probe}, {certificate.n} questions, chance {certificate.chance:.2f}"),
            ("re-prefill", _share(certificate.reprefill)),
            ("blind reuse", _share(certificate.blind)),
            ("patched reuse", _share(certificate.patched)),
            ("eta", _share(certificate.eta)),
            ("flip-recover", _share(certificate.flip_recover)),
            ("verdict", certificate.verdict),
            ("because", certificate.reason),
            ("written to", path),
        ],
    )


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "nothing to win back"
    return f"{estimate.mean:.3f}  ({estimate.low:.3f}..{estimate.high:.3f})"
