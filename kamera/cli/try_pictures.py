"""``kamera try``: the user's own model and pictures in a small window, beside a re-prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.demo import cells, follow, kept, last_answers
from kamera.cli.options import Loading, Model
from kamera.cli.output import Output, listing


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
    from kamera.eval.walk import QUESTION, walk_files
    from kamera.files import cache_dir

    backbone = loading.load(model, show_progress=out.shows_progress)
    steps = walk_files(backbone, files, ask or (QUESTION,), keep=keep, max_new_tokens=max_new_tokens)
    result, path = follow(out, steps, len(files) - keep + 2), view or cache_dir() / "try.html"
    document = kept(result, path, f"{model}: {len(files)} files")
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
    out.write(
        document,
        [listing(title, columns, rows), "", last_answers(result, "question"), "", f"The page: {path}"],
    )
