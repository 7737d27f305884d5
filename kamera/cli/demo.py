"""``kamera demo``: clips or pages under a small window, beside a prefix cache and blind reuse."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

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
        Literal["testbed", "smollm2", "screen-reader"],
        typer.Option(
            help="Clips on the shipped backbone, pages of text on SmolLM2, or screens on the screen reader."
        ),
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
    trained, and with ``--model screen-reader`` twelve screens; where it is not installed a line says so, and
    the world is shown.
    """
    from kamera.engines.hf import hide_progress
    from kamera.errors import UnsupportedBackbone
    from kamera.eval.demo import CACHE, run_demo
    from kamera.files import cache_dir

    if not out.shows_progress:
        hide_progress()
    missing = list[str]()
    if model != "testbed":
        try:
            return _read(out, model, view or cache_dir() / "demo.html")
        except UnsupportedBackbone as error:
            missing.append(f"{error}; so here is the shipped backbone")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = video or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        steps = run_demo(folder, clips=clips, per_kind=questions)
        result = follow(out, steps, clips * 8, "the backbone is loaded, the first clip rendered")
    seconds = time.perf_counter() - start
    path = view or cache_dir() / "demo.html"
    clip_folder = None if video is None else str(folder)  # a temporary folder is deleted by now
    title = "The demo: a small world in frames"
    document = {**kept(result, path, title), "video": clip_folder, "seconds": seconds}
    columns = ("after", "arm", "tokens before the answer", "in the background", "right", "KL, nats")
    rows = [(row.operation if row.arm == CACHE else "", *cells(row)) for row in result.rows]
    title = (
        f"{clips} clip{'s' * (clips > 1)}, three frames in view. Questions are about what is in view; in the "
        "worst case a legend that has left would answer otherwise. KL: to the re-prefill."
    )
    notes = [*missing, *([f"clips kept in {folder}"] if video else [])]
    lines = ["", *_picture(result), "", *notes, f"The first clip's page: {path}", "", _NEXT]
    out.write(document, [listing(title, columns, rows), *lines])


def _read(out: Output, model: Literal["smollm2", "screen-reader"], path: Path) -> None:
    """The part of the demo on SmolLM2's weights. Raises UnsupportedBackbone where they are not at hand."""
    from kamera.engines.hf import Backbone
    from kamera.eval.demo import CACHE
    from kamera.eval.pages import walk_pages
    from kamera.eval.screens import walk_screens

    walk, title, asked, does = {
        "smollm2": (
            walk_pages,
            "pages of text on SmolLM2",
            "begun",
            "SmolLM2-135M-Instruct reads twelve pages, three in view, and is asked how the first sentence of "
            "each goes on.",
        ),
        "screen-reader": (
            walk_screens,
            "screens on the screen reader",
            "question",
            "The screen reader sees twelve screens, three in view, and is asked two plain questions each.",
        ),
    }[model]
    backbone, start = Backbone.from_pretrained(model, dtype="float32"), time.perf_counter()
    result = follow(out, walk(backbone), 11)
    document = kept(result, path, f"The demo: {title}")
    document["seconds"] = time.perf_counter() - start
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
    title = f"{does} KL: to the re-prefill. Seconds: until a question can be asked, in all."
    answers = last_answers(result, asked)
    ends = ["", f"The page: {path}", "", _NEXT]
    out.write(document, [listing(title, columns, rows), "", *_picture(result), "", answers, *ends])


def follow(out: Output, steps: Iterator[str | Demo], count: int, first: str = "") -> Demo:
    """The table at the end of ``steps``, with a bar over the ``count`` operations before it."""
    from kamera.eval.demo import Demo

    with out.progress(count, "operation") as bar:
        if first:
            bar.set_description(first)
        for step in steps:
            if isinstance(step, Demo):
                return step
            bar.set_description(step)
            bar.update()
    raise AssertionError("a walk ends with its table")


def kept(result: Demo, path: Path, title: str) -> dict[str, Any]:
    """The JSON of a walk, whose page is written to ``path``."""
    from kamera.window.view import page

    path.write_text(page(result.events, title=title), encoding="utf-8")
    document = {**asdict(replace(result, events=())), "view": str(path)}
    document.pop("events")
    return document


def last_answers(result: Demo, asked: str) -> Table:
    """The answers after the last operation, beside the re-prefill's; ``asked`` heads the questions."""
    last = result.answers[-1][0]
    rows = [answer[1:] for answer in result.answers if answer[0] == last]
    return listing(f"After the last operation, {last}:", (asked, "re-prefill", "kamera"), rows)


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
