"""The tables on a model and pictures of one's own, or some tables only: rows for the terminal, and a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from kamera.cli.options import Dtype, Loading
from kamera.cli.output import listing
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import Anchor
from lab.basis import Basis
from lab.paper.document import Document, View, views
from lab.paper.draw import Make
from lab.paper.pictures import Pictures, PictureStage
from lab.paper.report import full_rows, number_text, words_of
from lab.paper.run import OF_THE_WORLD, Findings, Progress, measure_family
from lab.paper.sections import INTRODUCTION as OF_THE_TESTBED
from lab.paper.tally import MULTI

INTRODUCTION = (
    "Windows of pictures drawn from a folder. Nobody knows the answers: *accuracy* is agreement with the "
    "re-prefill. η = 1 − KL(arm ‖ re-prefill) / KL(blind ‖ re-prefill) of the "
    "answer's first token. Brackets are 95 % bootstrap intervals over questions."
)
COLUMNS = ("section", "setting", "arm", "n", "accuracy", "KL", "η", "flips restored", "bytes", "tokens")


def stages(pictures: Pictures) -> Make:
    """Stages of these pictures."""

    def make(backbone: HfEngine, anchor: Anchor, seed: int, index: int, basis: Basis | None) -> PictureStage:
        return PictureStage(backbone, anchor, seed, index, basis, source=pictures)

    return make


def measure_own(
    model: str,
    data: Path,
    *,
    items: int,
    seed: int,
    tables: Sequence[str],
    device: str | None,
    dtype: Dtype,
    system: str | None = None,
) -> Iterator[Progress | Findings]:
    """`measure_family` of a model directory or hub name on a folder of pictures.

    Tables of the testbed's world alone are left out. Raises TaskDataError for a folder that lacks something,
    before the model is loaded.
    """
    pictures = Pictures.read(data)
    backbone = Loading(device, dtype).load(model, show_progress=False)
    kept = [name for name in tables if name not in OF_THE_WORLD]
    name = Path(model).name or model
    yield from measure_family(name, backbone, items, seed, tables=kept, make=stages(pictures), system=system)


def tables(result: Document) -> Iterator[Table | str]:
    """All rows, for the terminal."""
    for view in views(result):
        rows = [
            (
                row["section"],
                words_of(row["setting"]),
                row["arm"],
                row["n"],
                *(number_text(row[what]) for what in ("accuracy", "kl", "eta", "flip_recover")),
                f"{row['share']:.1%}",
                f"{row['tokens']:.0f}",
            )
            for row in view.family["rows"]
            if row["kind"] == MULTI
        ]
        yield listing(f"{view.name}, {result.get('data', 'the world of the testbed')}", COLUMNS, rows)
        yield from _numbers(view)


def page(result: Document, figures: Sequence[str]) -> str:
    """The same as Markdown."""
    lines = [
        f"# Tables of the paper on {result.get('data', 'the world of the testbed')}",
        "",
        f"`{result['command']}`, commit {result['commit']}, {result['dtype']}, {result['seconds']:.0f} s",
        "",
        INTRODUCTION if "data" in result else OF_THE_TESTBED,
        "",
        *([" ".join(f"![{name.removesuffix('.png')}]({name})" for name in figures), ""] if figures else []),
    ]
    for view in views(result):
        for section in dict.fromkeys(row["section"] for row in view.family["rows"]):
            lines += [f"## {section}, {view.name}", "", *full_rows(view.rows(section)), ""]
    return "\n".join(lines)


def _numbers(view: View) -> Iterator[Table]:
    rows = [
        (n["section"], n["name"], words_of(n["setting"]), n["n"], number_text(n["value"]))
        for n in view.family["numbers"]
    ]
    if rows:
        yield listing(f"\n{view.name}: measured", ("section", "what", "setting", "n", "value"), rows)
