"""``kamera compile``: form and store the patches of a plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kamera.cli.models import load_backbone
from kamera.cli.options import (
    Device,
    Dtype,
    File,
    Form,
    Format,
    Model,
    PatchBytes,
    Precision,
    Quiet,
    StoreDirectory,
    Tenant,
)
from kamera.cli.output import Output, facts, size
from kamera.compile import CompileReport, Counts, Job, Plan, Settings, read_plan
from kamera.store import ChunkStore
from kamera.window import ReusePolicy

_SHOWN = 10


def compile_plan(
    model: Model,
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            exists=True,
            dir_okay=False,
            help='JSON lines, a window each: {"system": …, "chunks": [text, {"image": path}, …]}.',
        ),
    ],
    store: StoreDirectory,
    rank: Annotated[int, typer.Option(min=1, help="Directions a patch keeps per layer and channel.")] = 32,
    patch_bytes: PatchBytes = ReusePolicy.patch_bytes or 0.0,
    orbit: Annotated[
        bool, typer.Option("--orbit", help="Also one patch for all orders of what stands before a chunk.")
    ] = False,
    samples: Annotated[
        int, typer.Option(min=1, help="Orderings an orbit patch averages, above four antecedents.")
    ] = 24,
    limit: Annotated[int | None, typer.Option(min=1, help="Compile the first N lines only.")] = None,
    device: Device = None,
    dtype: Precision = Dtype.auto,
    tenant: Tenant = "",
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Form and store canonicals and patches for every chunk of every window of a plan.

    What is stored already is left alone, so a run that was killed is simply run again. Exit code 1 when
    a line failed on its way (the others are done), 2 when the plan is bad (nothing is done).
    """
    out = Output(format, output, quiet)
    settings = Settings(rank=rank, patch_bytes=patch_bytes or None, orbit=orbit, samples=samples, limit=limit)
    planned = read_plan(plan)
    fresh = not (store.is_dir() and any(store.iterdir()))
    if not fresh:
        ChunkStore.open(store, tenant=tenant).close()  # refuse a stranger's folder before loading a model
    backbone = load_backbone(model, device, dtype, show_progress=out.shows_progress)
    if planned.stored_ids and fresh:
        with ChunkStore.open("memory://", tenant=tenant) as nothing:
            Job(planned, backbone, nothing, settings)  # refuses the ids, and leaves no store behind
    with ChunkStore.open(store, tenant=tenant) as opened:
        job = Job(planned, backbone, opened, settings)
        with out.progress(job.chunks, "chunk") as bar:
            for step in job.steps():
                bar.set_postfix_str(f"{step.where} {step.outcome}", refresh=False)
                bar.update()
        report = job.report()
    heading = {"model": model, "plan": str(plan), "store": str(store), "rank": rank}
    out.write({**heading, **asdict(report)}, _tables(planned, store, report))
    if report.failures:
        raise typer.Exit(1)


def _tables(plan: Plan, store: Path, report: CompileReport) -> list[Table | str]:
    rows: list[tuple[str, object]] = [
        ("windows", f"{report.windows}, {len(report.failures)} failed"),
        ("chunks", report.chunks),
        ("canonicals", _counted(report.canonicals)),
        ("patches", _counted(report.patches)),
        ("orbit patches", _counted(report.orbits)),
        ("forwards", f"{report.forwards} ({report.tokens} tokens)"),
        ("vision encodes", report.vision_encodes),
        ("stored", size(report.bytes_stored)),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    lines = [f"failed: {f.where}: {f.error}" for f in report.failures[:_SHOWN]]
    if len(report.failures) > _SHOWN:
        lines.append(f"… and {len(report.failures) - _SHOWN} more (--format json lists them all)")
    return [facts(f"{plan.path} → {store}", rows), *lines]


def _counted(counts: Counts) -> str:
    return f"{counts.formed} formed, {counts.reused} reused, {counts.skipped} skipped"
