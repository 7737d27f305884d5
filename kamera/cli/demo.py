"""``kamera demo``: a rendered clip under a small window, four ways of keeping its KV, side by side."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kamera.cli.command import command
from kamera.cli.output import Output, listing

if TYPE_CHECKING:
    from kamera.eval.demo import Demo

_NEXT = """\
Bring your own model (a directory, or a name: Qwen/Qwen2.5-VL-7B-Instruct):
    kamera doctor MODEL
and your own video:
    backbone = Backbone.from_pretrained(MODEL)
    window = KameraWindow(backbone, store, trace="trace.jsonl")
    for frame in read_video("kitchen.mp4", fps=1).frames: window.append(frame)
    kamera view trace.jsonl"""
_BAR = 36


@command
def demo(
    out: Output,
    clips: Annotated[int, typer.Option(min=1, help="Clips to render and walk through.")] = 3,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each kind after each operation.")] = 8,
    video: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the rendered clips in this folder.")
    ] = None,
    view: Annotated[
        Path | None,
        typer.Option("--view", dir_okay=False, help="The page to write (default: in your cache folder)."),
    ] = None,
) -> None:
    """Film a small world, slide, recall and reorder, and compare with re-prefill and blind reuse."""
    from kamera.engines.hf import hide_progress
    from kamera.eval.demo import Demo, run_demo
    from kamera.files import cache_dir
    from kamera.window.view import page

    if not out.shows_progress:
        hide_progress()
    start = time.perf_counter()
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
    seconds = time.perf_counter() - start
    path = view or cache_dir() / "demo.html"
    path.write_text(page(result.events, title="The demo: a small world in frames"), encoding="utf-8")
    clip_folder = None if video is None else str(folder)  # a temporary folder is deleted by now
    entries = asdict(replace(result, events=()))
    entries.pop("events")
    document = {**entries, "video": clip_folder, "view": str(path), "seconds": seconds}
    columns = ("after", "arm", "one-hop", "two-hop", "KL", "forwards", "encodes", "ms")
    rows = [
        (
            row.operation if row.arm == "re-prefill" else "",
            row.arm,
            f"{row.one_hop:.2f}",
            f"{row.two_hop:.2f}",
            f"{row.kl:.0e}",
            f"{row.forwards:g}",
            f"{row.vision_encodes:g}",
            _ms(row.milliseconds),
        )
        for row in result.rows
    ]
    number = f"{clips} clip{'s' * (clips > 1)}, {result.rows[0].n} questions of each kind per row."
    title = (
        f"{number} One-hop: the answer stands in one frame. Two-hop: it needs two. KL: to the re-prefill, "
        "two-hop, nats. Cost: to have the window ready."
    )
    notes = [f"clips kept in {folder}"] if video else []
    lines = ["", *_picture(result), "", *notes, f"The first clip's page: {path}", "", _NEXT]
    out.write(document, [listing(title, columns, rows), *lines])


def _picture(result: Demo) -> Iterator[str]:
    """What it takes to have the window ready, as bars: a re-prefill beside Kamera's repair."""
    arms = {"re-prefill": "re-prefill", "repair": "Kamera"}
    rows = [row for row in result.rows if row.arm in arms and row.operation in ("slide", "recall", "reorder")]
    most = max(row.milliseconds for row in rows)
    yield "milliseconds until the window is ready, and answers that are right (two-hop)"
    for row in rows:
        name = row.operation if row.arm == "re-prefill" else ""
        bar = "█" * max(1, round(_BAR * row.milliseconds / most))
        yield f"{name:9}{arms[row.arm]:11}{bar:{_BAR}} {_ms(row.milliseconds):>6}  {row.two_hop:4.0%}"


def _ms(milliseconds: float) -> str:
    """In five digits at most, so that a slow machine's table is no wider."""
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1}f}"
