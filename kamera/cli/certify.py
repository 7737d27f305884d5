"""``kamera certify``: what does each kind of reused KV lose on this model?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kamera.certify import DEFAULT, DOCUMENTS, MEASURED, CertifyReport, Estimate
from kamera.certify import certify as measured
from kamera.cli.command import command
from kamera.cli.options import File, Form, Loading, Model, PatchBytes, Quiet, writable
from kamera.cli.output import Output, facts_table, listing
from kamera.trust import ReusePolicy


@command
def certify(
    model: Model,
    loading: Loading,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]...", help="Pictures and texts to read (default: Kamera's own)."),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(help="What is asked about your files; give it again for more."),
    ] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Documents of eight pictures or passages to read.")
    ] = DOCUMENTS,
    guarantee: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(MEASURED)}; again for more (default: all but near)."),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the patches.")] = ReusePolicy.rank,
    patch_bytes: PatchBytes = ReusePolicy.patch_bytes or 0.0,
    report: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=writable,
            help="File for the report (default: certify-MODEL.json, here).",
        ),
    ] = None,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Measure what each guarantee loses against a re-prefill, and write a report.

    KL and flipped tokens over the re-prefill's own answers, with 95 % intervals over documents, for patched,
    orbit, survivor and blind KV. ReusePolicy.from_report(FILE, max_kl=...) makes a policy of it.
    """
    unknown = [name for name in guarantee or () if name not in MEASURED]
    if unknown:  # checked before the model is loaded
        raise ValueError(f"guarantee {unknown[0]!r} is none of {', '.join(MEASURED)}")
    out = Output(format, output, quiet)
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    path = report or Path(f"certify-{name}.json")
    backbone = loading.load(model, show_progress=out.shows_progress)
    with out.progress(documents, "document") as bar:
        made = measured(
            backbone,
            files or (),
            questions=question or (),
            documents=documents,
            rank=rank,
            patch_bytes=patch_bytes or None,
            guarantees=[g for g in MEASURED if g in guarantee] if guarantee else DEFAULT,
            model=model,
            bar=bar,
        )
    made.write(path)
    out.write({**asdict(made), "path": str(path)}, _tables(made, path))


def _tables(made: CertifyReport, path: Path) -> Iterator[Table | str]:
    budget = (
        "as the rank takes" if made.patch_bytes is None else f"at most {made.patch_bytes:.3g} of the KV's"
    )
    yield facts_table(
        made.model,
        [
            ("fingerprint", made.fingerprint),
            ("dtype", made.dtype),
            ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
            ("rank", made.rank),
            ("patch bytes", budget),
            ("read", f"{made.rows[0].documents} documents of {made.material}"),
            ("judged", f"{made.rows[0].tokens} tokens of answers, 95 % intervals over documents"),
            ("report", path),
        ],
    )
    yield ""
    columns = ("guarantee", "departed", "KL (nats)", "eta", "flips", "alike", "KV error")
    rows = [
        (
            row.guarantee,
            "-" if row.departed is None else f"{row.departed:.2f}",
            _show(row.kl, ".2g"),
            "-" if row.eta is None or row.guarantee == "blind" else _show(row.eta, ".2f"),
            _show(row.flips, ".3f"),
            "" if row.alike is None else _show(row.alike, ".1f"),
            _show(row.kv, ".2g"),
        )
        for row in made.rows
    ]
    yield listing("", columns, rows)


def _show(estimate: Estimate, form: str) -> str:
    return f"{estimate.mean:{form}} ({estimate.low:{form}}..{estimate.high:{form}})"
