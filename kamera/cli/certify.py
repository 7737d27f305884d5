"""``kamera certify``: which reused KV may this model serve?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from kamera.certify import ITEMS, TRIALS
from kamera.certify import certify as probed
from kamera.cli.command import command
from kamera.cli.options import Form, Loading, Model, PatchBytes, Quiet
from kamera.cli.output import Output, facts_table, listing
from kamera.trust import Certificate, Estimate, Finding, ReusePolicy
from kamera.window.certified import certificate_home

Scenes = Literal["pages", "world"]
"""Scenes of the probe: pages of English for models that read, the synthetic world for the shipped one."""


@command
def certify(
    model: Model,
    loading: Loading,
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of the patches; the certificate serves policies of this rank.")
    ] = ReusePolicy.rank,
    patch_bytes: PatchBytes = ReusePolicy.patch_bytes or 0.0,
    probe: Annotated[
        Scenes | None, typer.Option(help="Questions of the probe (default: pages; world for 'testbed').")
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Questions to ask about each guarantee.")] = ITEMS,
    format: Form = "table",
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Directory for the certificate (default: KAMERA_CERTIFICATES, or the user's).",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure what a model loses with reused KV, and write a certificate.

    For each guarantee (patched, sampled, orbit, survivor, near) it says whether it is safe. Builds that are
    wrong on purpose get the same questions and must be found unsafe. Exit code 0: patched KV is safe. 1: it
    is not, or the probe cannot tell. The certificate is written in every case; windows serve what is safe.
    """
    folder = certificate_home() if output is None else output
    if folder is None:  # checked before the model is loaded
        raise ValueError("this user has no home for a certificate: give --output, or set KAMERA_CERTIFICATES")
    out = Output(format, None, quiet)
    scenes = probe or ("world" if model == "testbed" else "pages")
    backbone = loading.load(model, show_progress=out.shows_progress)
    with out.progress(items * len(TRIALS), "question") as bar:
        certificate = probed(
            backbone,
            probe=scenes,
            items=items,
            rank=rank,
            patch_bytes=patch_bytes or None,
            model=model,
            bar=bar,
        )
    path = certificate.write(folder)
    out.write({**asdict(certificate), "path": str(path)}, _tables(certificate, path))
    if certificate.refusal("patched") is not None:
        raise typer.Exit(1)


def _tables(certificate: Certificate, path: Path) -> Iterator[Table | str]:
    yield facts_table(certificate.model, _facts(certificate, path))
    groups: dict[str, Mapping[Any, Finding]] = {
        "served": certificate.findings,
        "wrong on purpose": certificate.sabotages,
    }
    for what, findings in groups.items():
        yield ""
        yield listing(
            "",
            (what, "verdict", "re-prefill", "blind", "served", "eta", "flip-recover"),
            [_row(name, finding) for name, finding in findings.items()],
        )
        yield from (f"{name}: {finding.reason}" for name, finding in findings.items())


def _facts(certificate: Certificate, path: Path) -> list[tuple[str, object]]:
    grounds, finding = certificate.grounds, certificate.findings["patched"]
    share, limit = grounds.budget.share, grounds.position_limit
    return [
        ("fingerprint", grounds.fingerprint),
        ("dtype", grounds.dtype),
        ("vocabulary", grounds.vocabulary),
        ("positions", "without end" if limit is None else f"below {limit}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in grounds.versions.items())),
        ("rank", grounds.budget.rank),
        ("patch bytes", "as the rank takes" if share is None else f"at most {share:.3g} of the KV's"),
        ("probe", f"{certificate.probe}, {finding.n} questions a guarantee, chance {finding.chance:.2f}"),
        ("written to", path),
    ]


def _row(name: str, finding: Finding) -> tuple[str, ...]:
    numbers = (finding.reprefill, finding.blind, finding.served, finding.eta, finding.flip_recover)
    return (name, finding.verdict, *map(_share, numbers))


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.mean:.2f} ({estimate.low:.2f}..{estimate.high:.2f})"
