"""``kamera try``: the user's own model and pictures in a small window, beside a re-prefill."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kamera.cli.command import command
from kamera.cli.demo import cells
from kamera.cli.options import Loading, Model
from kamera.cli.output import Output, listing

if TYPE_CHECKING:
    from kamera.eval.demo import Demo


@command
def try_pictures(
    model: Model,
    loading: Loading,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="PICTURES...", help="Pictures, in the order in which they come; or texts."),
    ],
    out: Output,
    ask: Annotated[
        list[str] | None, typer.Option(help="A question after each operation; give it again for more.")
    ] = None,
    keep: Annotated[int, typer.Option(min=2, help="Pictures that stay in view.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    view: Annotated[
        Path | None,
        typer.Option("--view", dir_okay=False, help="The page to write (default: in your cache folder)."),
    ] = None,
) -> None:
    """Slide a window over your own pictures, look back, reorder, and compare with a re-prefill.

    Tokens before each answer beside those of a prefix cache, and how many answers are the re-prefill's to the
    letter. Nothing is written but the page of it.
    """
    from kamera.eval.demo import Demo
    from kamera.eval.walk import QUESTION, walk_files
    from kamera.files import cache_dir
    from kamera.window.view import page

    backbone = loading.load(model, show_progress=out.shows_progress)
    steps = walk_files(backbone, files, ask or (QUESTION,), keep=keep, max_new_tokens=max_new_tokens)
    with out.progress(len(files) - keep + 2, "operation") as bar:
        for step in steps:
            if isinstance(step, Demo):
                result = step
            else:
                bar.set_description(step)
                bar.update()
    path = view or cache_dir() / "try.html"
    path.write_text(page(result.events, title=f"{model}: {len(files)} files"), encoding="utf-8")
    document = {**asdict(replace(result, events=())), "view": str(path)}
    document.pop("events")
    columns = (
        "after",
        "arm",
        "tokens before the answer",
        "in the background",
        "as the re-prefill",
        "KL, nats",
    )
    rows = [(row.operation, *cells(row)) for row in result.rows]
    title = f"{keep} in view of {len(files)} files. KL: of the first token, to the re-prefill."
    out.write(document, [listing(title, columns, rows), "", _said(result), "", f"The page: {path}"])


def _said(result: Demo) -> Table:
    """The answers after the last operation, beside the re-prefill's."""
    last = result.answers[-1][0]
    rows = [answer[1:] for answer in result.answers if answer[0] == last]
    return listing(f"After the last operation, {last}:", ("question", "re-prefill", "kamera"), rows)
