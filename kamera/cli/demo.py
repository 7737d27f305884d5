"""``kamera demo``: clips or pages under a small window, beside a prefix cache and blind reuse."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kamera.cli.command import command
from kamera.cli.output import Output, listing

if TYPE_CHECKING:
    from kamera.eval.demo import Demo, DemoRow

_NEXT = """\
Your own model (a directory, or a name: Qwen/Qwen2.5-VL-7B-Instruct) and video:
    kamera doctor MODEL
    python - <<'END'
from kamera import Backbone, ChunkStore, KameraWindow, read_video
backbone, store = Backbone.from_pretrained("MODEL"), ChunkStore.open("memory://")
window = KameraWindow(backbone, store, trace="trace.jsonl")
for frame in read_video("kitchen.mp4", fps=1).frames:
    if len(window) == 8:
        window.slide()
    window.append(frame)
print(window.generate("What changed?"), window.usage())
END
    kamera view trace.jsonl"""
_BAR = 36


@command
def demo(
    out: Output,
    model: Annotated[
        Literal["testbed", "smollm2"],
        typer.Option(help="Clips on the shipped backbone, or pages of text on SmolLM2-135M-Instruct."),
    ] = "testbed",
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
    """Film a small world, edit its window, and compare with a prefix cache and blind reuse.

    With ``--model smollm2`` an agent reads twelve pages, keeps three and looks back, on a model that others
    trained; where it is not installed a line says so, and the world is shown.
    """
    from kamera.engines.hf import hide_progress
    from kamera.errors import UnsupportedBackbone
    from kamera.eval.demo import CACHE, Demo, run_demo
    from kamera.files import cache_dir
    from kamera.window.view import page

    if not out.shows_progress:
        hide_progress()
    missing = list[str]()
    if model == "smollm2":
        try:
            return _read_pages(out, view or cache_dir() / "demo.html")
        except UnsupportedBackbone as error:
            missing.append(f"{error}; so here is the shipped backbone")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = video or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with out.progress(clips * 8, "operation") as bar:
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
    columns = ("after", "arm", "tokens before the answer", "in the background", "right", "KL, nats")
    rows = [(row.operation if row.arm == CACHE else "", *cells(row)) for row in result.rows]
    title = (
        f"{clips} clip{'s' * (clips > 1)}, three frames in view. Questions are about what is in view; in the "
        "worst case a legend that has left would answer otherwise. KL: to the re-prefill."
    )
    notes = [*missing, *([f"clips kept in {folder}"] if video else [])]
    lines = ["", *_picture(result), "", *notes, f"The first clip's page: {path}", "", _NEXT]
    out.write(document, [listing(title, columns, rows), *lines])


def _read_pages(out: Output, path: Path) -> None:
    """The part of the demo on SmolLM2. Raises UnsupportedBackbone where it is not at hand."""
    from kamera.engines.hf import Backbone
    from kamera.eval.demo import CACHE, Demo
    from kamera.eval.pages import walk_pages
    from kamera.window.view import page

    backbone, start = Backbone.from_pretrained("smollm2", dtype="float32"), time.perf_counter()
    with out.progress(11, "operation") as bar:
        for step in walk_pages(backbone):
            if isinstance(step, Demo):
                result = step
            else:
                bar.set_description(step)
                bar.update()
    seconds = time.perf_counter() - start
    path.write_text(page(result.events, title="The demo: pages of text on SmolLM2"), encoding="utf-8")
    document = {**asdict(replace(result, events=())), "view": str(path), "seconds": seconds}
    document.pop("events")
    columns = (
        "after",
        "arm",
        "tokens before the answer",
        "in the background",
        "right",
        "KL, nats",
        "seconds",
    )
    rows = [
        (row.operation if row.arm == CACHE else "", *cells(row), f"{row.seconds:.2f}" if row.seconds else "–")
        for row in result.rows
    ]
    title = (
        "SmolLM2-135M-Instruct reads twelve pages, three in view, and is asked how the first sentence of "
        "each goes on. KL: to the re-prefill. Seconds: until a question can be asked, in all."
    )
    last = result.answers[-1][0]
    told = [answer[1:] for answer in result.answers if answer[0] == last]
    answers = listing(f"After the last operation, {last}:", ("begun", "re-prefill", "kamera"), told)
    ends = ["", f"The page: {path}", "", _NEXT]
    out.write(document, [listing(title, columns, rows), "", *_picture(result), "", answers, *ends])


def cells(row: DemoRow) -> tuple[str, ...]:
    """The arm of a row and its figures."""
    figures = (f"{row.tokens:,}", f"{row.background:,}", f"{row.right} of {row.n}", f"{row.kl:.0e}")
    return (row.arm, *figures)


def _picture(result: Demo) -> Iterator[str]:
    """The tokens before the answers, as bars: a prefix cache beside Kamera."""
    arms = ("prefix cache", "kamera")
    rows = [row for row in result.rows if row.arm in arms and row.operation != "prepare orders"]
    most = max(1, *(row.tokens for row in rows))
    yield "tokens before the answers, and answers that are right"
    for row in rows:
        name = row.operation if row.arm == "prefix cache" else ""
        bar = "█" * round(_BAR * row.tokens / most)
        yield f"{name:31}{row.arm:13}{bar:{_BAR}} {row.tokens:>6,}  {row.right} of {row.n}"
    totals = [sum(row.tokens for row in rows if row.arm == arm) for arm in arms]
    yield f"{'together':31}{'prefix cache':13}{totals[0]:,} tokens, kamera {totals[1]:,}"
