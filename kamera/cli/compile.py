"""``kamera compile``: form and store the patches of a plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.options import Loading, Model, Owner, PatchBytes
from kamera.cli.output import Output
from kamera.cli.place import Coded, StorePlace, StoreUrl
from kamera.compile import CompileJob, Settings, read_plan
from kamera.compile.job import refuse_ids
from kamera.compile.plan import ById
from kamera.engines.hf import SHIPPED
from kamera.trust import ReusePolicy


@command
def compile_plan(
    model: Model,
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            exists=True,
            dir_okay=False,
            help='JSON lines, one window each: {"system": …, "chunks": [text, {"image": path}, …]}.',
        ),
    ],
    store: StoreUrl,
    owner: Owner,
    loading: Loading,
    out: Output,
    rank: Annotated[int, typer.Option(min=1, help="Directions a patch keeps per layer and channel.")] = 32,
    patch_bytes: PatchBytes = ReusePolicy.patch_bytes or 0.0,
    layers: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Layers a patch corrects, from A up to B - 1, or A,B,…; else all."),
    ] = None,
    orbit: Annotated[
        bool, typer.Option("--orbit", help="Also one patch for all orders of a chunk's antecedents.")
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Orderings that an orbit patch averages (default: a small balanced set)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Compile the first N lines only.")] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Largest share of a deficit that a patch may leave out, in its worst layer and channel; a "
            "patch grows until it does not (default: no bound).",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compile by N processes on Ray: the cluster of RAY_ADDRESS, or this machine."
        ),
    ] = None,
    kv: Coded = "as-is",
) -> None:
    """Form and store canonicals and patches for every chunk of every window of a plan.

    Stored objects are not formed again, so a killed run is simply repeated. Exit code 1 if a line failed (the
    others are done), 2 if the plan is invalid (nothing is done).
    """
    settings = Settings(
        rank=rank,
        patch_bytes=patch_bytes or None,
        layers=_layers(layers),
        orbit=orbit,
        samples=samples,
        limit=limit,
        max_error=max_error,
    )
    plan_file = read_plan(plan)
    place = StorePlace(store, owner, kv)
    if place.exists:
        place.open_answering().close()  # refuse a foreign folder before loading a model
    else:
        windows = plan_file.windows[:limit]  # a store that does not exist yet holds no chunk
        ids = {(w.system, c.chunk_id) for w in windows for c in w.chunks if isinstance(c, ById)}
        refuse_ids(windows, ids, place.url)
    if workers is not None:
        from kamera.compile.cluster import run_on_ray

        folder = Path(model).expanduser()  # workers have other working directories
        where = str(folder.absolute()) if model != SHIPPED and folder.exists() else model
        load = partial(loading.load, where, show_progress=False)
        gpu = (loading.device or "").startswith("cuda")
        report = run_on_ray(plan_file, load, place.open, settings, workers, gpu=gpu)
        with place.open() as chunk_store:
            url = chunk_store.url
    else:
        backbone = loading.load(model, show_progress=out.shows_progress)  # first: a failure creates no store
        with place.open() as chunk_store:
            job = CompileJob(plan_file, backbone, chunk_store, settings)
            with out.progress(job.units, "part") as bar:
                for step in job.steps():
                    bar.set_postfix_str(step.doing, refresh=False)
                    bar.update(step.units)
            report, url = job.report(), chunk_store.url
    out.show({"model": model, "plan": str(plan), "store": url, "rank": rank, **asdict(report)})
    if report.failures:
        raise typer.Exit(1)


def _layers(text: str | None) -> Sequence[int] | str | None:
    """``A:B`` unchanged, ``A,B,…`` as numbers."""
    if text is None or not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        return text
    return [int(number) for number in text.split(",")]
