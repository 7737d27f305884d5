"""``kamera demo``: a rendered clip under a small window, four ways of keeping its KV, side by side."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.output import Output, listing


@command
def demo(
    out: Output,
    clips: Annotated[int, typer.Option(min=1, help="Clips to render and walk through.")] = 3,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each kind after each operation.")] = 8,
    video: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the rendered clips in this folder.")
    ] = None,
) -> None:
    """Film a small world, slide, recall and reorder, and compare with re-prefill and blind reuse."""
    from kamera.engines.hf import hide_progress
    from kamera.eval.demo import Demo, run_demo

    if not out.shows_progress:
        hide_progress()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = video or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with out.progress(clips * 6, "operation") as bar:
            bar.set_description("the backbone is loaded, the first clip rendered")
            for step in run_demo(folder, clips=clips, per_kind=questions):
                if isinstance(step, Demo):
                    result = step
                else:
                    bar.set_description(step)
                    bar.update()
    kept = None if video is None else str(folder)  # a temporary folder is deleted by now
    document = {**asdict(result), "video": kept, "seconds": time.perf_counter() - started}
    columns = ("after", "arm", "one-hop", "two-hop", "KL", "forwards", "vision encodes", "ms")
    rows = [
        (
            row.operation if row.arm == "re-prefill" else "",
            row.arm,
            f"{row.one_hop:.2f}",
            f"{row.two_hop:.2f}",
            f"{row.kl:.1e}",
            f"{row.forwards:g}",
            f"{row.vision_encodes:g}",
            f"{row.milliseconds:.1f}",
        )
        for row in result.rows
    ]
    title = (
        f"{clips} clips, {result.rows[0].n} questions of each kind per row. One-hop: read in a frame. "
        "Two-hop: bound across frames, or by none any more. KL: to the re-prefill, two-hop, nats. "
        "Cost: to have the window ready."
    )
    walk = [f"{operation}, {arm}: {guarantees}" for operation, arm, guarantees in result.guarantees]
    where = [f"clips kept in {folder}"] if video else []
    out.write(document, [listing(title, columns, rows), "slots of the first clip after", *walk, *where])
