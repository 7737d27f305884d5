"""``kamera eval reuse freeze|run|score|schema``: the benchmark of reuse itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kamera.cli.command import command
from kamera.cli.lazy import Verb, group
from kamera.cli.options import ArmModules, Dtype, File, Format, Loading, ModelOption, Quiet, View
from kamera.cli.output import Output, finite, listing

if TYPE_CHECKING:
    from kamera.eval.reuse import Benchmark, Scores, Submission
    from kamera.window.view import Measured

Folder = Annotated[
    Path, typer.Argument(metavar="BENCH", file_okay=False, help="Folder of a frozen benchmark.")
]
ARMS = "exact,prefix,blind,keep,repair,patch@16,random-patch@16,other-patch@16"


@command
def freeze(
    written: Output,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="testbed, mm-niah, muirbench, ovo-bench, mmlongbench-doc or gui-odyssey."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder of the benchmark, made here.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", exists=True, file_okay=False, help="The set's folder, as published."),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Items, drawn by --seed.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Draws items and traces.")] = 0,
    units: Annotated[
        int,
        typer.Option(min=4, help="Frames, pages or screenshots of a window, if the set has no windows."),
    ] = 8,
    system: Annotated[
        str | None, typer.Option(help="System prompt [default: the chat template's own; the testbed's].")
    ] = None,
) -> None:
    """Write items, traces and pictures to a folder, with a digest that every later run checks."""
    from kamera.eval.reuse import Item, draw_items
    from kamera.eval.reuse import freeze as write
    from kamera.testbed import SYSTEM

    spoken = SYSTEM if system is None and source == "testbed" else system
    origin = {"source": source, "items": items, "seed": seed, "units": units}
    drawn = draw_items(source, data, count=items, seed=seed, units=units)
    with written.progress(items, "item") as bar:

        def counted() -> Iterator[Item]:
            for item in drawn:
                if isinstance(item, Item):
                    yield item
                    bar.update()
                else:
                    written.note(str(item))

        made = write(counted(), out, system=spoken, origin=origin)
    traces = sum(len(item.traces) for item in made.items)
    document = {"benchmark": str(out), "digest": made.digest, "items": len(made.items), "questions": traces}
    written.show(document | origin)


@command
def run(
    folder: Folder,
    loading: Loading,
    written: Output,
    model: ModelOption = "testbed",
    arms: Annotated[
        str,
        typer.Option(
            help="Arms, separated by commas; exact is needed.", show_default=ARMS.replace(",", ", ")
        ),
    ] = ARMS,
    arm_module: ArmModules = None,
    items: Annotated[int | None, typer.Option(min=1, help="Only the first items.")] = None,
    submission: Annotated[
        Path | None,
        typer.Option("--submission", dir_okay=False, help="File for all answers."),
    ] = None,
    view: View = None,
) -> None:
    """Ask every item behind every trace under every arm, and score the answers."""
    from kamera.eval.arms import arms_of
    from kamera.eval.reuse import arms_named, load, run_benchmark, score_submission

    names = [name.strip() for name in arms.split(",")]
    makers = arms_named(names, arms_of(arm_module or ()))  # fails before the model is loaded
    benchmark = load(folder)
    backbone = loading.load(model, show_progress=written.shows_progress)
    count = min(len(benchmark.items), items or len(benchmark.items))
    with written.progress(count, "item") as bar:
        made = run_benchmark(backbone, benchmark, makers, limit=items, on_item=bar.update)
    if submission is not None:
        submission.write_text(json.dumps(made.document(), indent=1) + "\n", encoding="utf-8")
    command = f"kamera eval reuse run {folder} --model {model} --arms {','.join(names)}"
    command += "".join(f" --arm-module {module}" for module in arm_module or ())
    command += f" --items {items}" if items else ""
    command += "" if loading.dtype is Dtype.auto else f" --dtype {loading.dtype.value}"
    _write(written, [(made, score_submission(made, benchmark))], benchmark, {"command": command}, view)


@command
def score(
    folder: Folder,
    written: Output,
    submissions: Annotated[
        list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False, help="Submissions.")
    ],
    view: View = None,
) -> None:
    """Check submissions against the schema and the benchmark, and score them; no model is needed."""
    from kamera.eval.reuse import load, read_submission, score_submission

    benchmark = load(folder)
    made = [read_submission(path, benchmark) for path in submissions]
    scored = [(one, score_submission(one, benchmark)) for one in made]
    _write(written, scored, benchmark, {}, view)


def schema(output: File = None, quiet: Quiet = False) -> None:
    """The JSON schema of a submission."""
    from kamera.eval.reuse import schema as published

    Output(Format.json, output, quiet).write(published(), [])


VERBS = {name: Verb(f"kamera.cli.eval_reuse:{name}") for name in ("freeze", "run", "score", "schema")}
reuse = typer.Typer(
    help="The frozen benchmark of reuse: windows with a history, and what each method of reuse costs.",
    cls=group(VERBS),
    no_args_is_help=True,
)


def _write(
    written: Output,
    scored: list[tuple[Submission, Scores]],
    benchmark: Benchmark,
    about: dict[str, Any],
    view: Path | None,
) -> None:
    """Tables or the document; a note for passing sabotage. Exit code 1 if nothing could be compared."""
    for _, scores in scored:
        for problem in scores.errors:
            written.note(problem)
        for one in scores.sabotage:
            if not one.caught:
                written.note(f"cannot tell: {one.sabotage} is not below {one.of} here; ask more items")
    document = {
        **about,
        "benchmark": {"digest": benchmark.digest, "origin": dict(benchmark.origin)},
        "submissions": [{"system": dict(made.system), **scores.document()} for made, scores in scored],
    }
    written.write(finite(document), [table for made, scores in scored for table in _tables(made, scores)])
    facts = {**about, "benchmark": benchmark.digest, **benchmark.origin}
    written.draw(view, "The benchmark of reuse", facts, *[_drawn(made, scores) for made, scores in scored])
    if not any(scores.rows for _, scores in scored):
        written.note("no item was answered under every arm")
        raise typer.Exit(1)


def _tables(made: Submission, scores: Scores) -> list[Any]:
    columns = (
        *("arm", "n", "accuracy", "95 %", "agreement", "95 %", "flip-recover", "95 %"),
        *("KL", "recomputed", "kept", "TTFT"),
    )
    rows = [
        (
            row.arm + (" (rehearsed)" if row.rehearsed else ""),
            row.n,
            *(text for value in (row.accuracy, row.agreement, row.flip_recover) for text in _interval(value)),
            f"{row.kl.mean:.1e}",
            f"{row.recomputed:.0%}",
            f"{row.kept:.2f}×",
            f"{row.ttft:.2f}×",
        )
        for row in scores.rows
        if row.trace == "all"
    ]
    traces = list(dict.fromkeys(row.trace for row in scores.rows if row.trace != "all"))
    by_trace = [
        (arm, *(f"{scores.row(arm, trace).agreement.mean:.3f}" for trace in traces))
        for arm in dict.fromkeys(row.arm for row in scores.rows)
    ]
    return [
        _title(made, scores),
        listing("", columns, rows),
        "\nagreement by trace",
        listing("", ("arm", *traces), by_trace),
    ]


def _drawn(made: Submission, scores: Scores) -> Measured:
    """The arms by what they run, the cheapest first."""
    from kamera.window.view import Measured, Way

    rows = sorted((row for row in scores.rows if row.trace == "all"), key=lambda row: row.recomputed)
    ways = [
        Way(
            row.arm,
            (row.accuracy, row.agreement, row.flip_recover),
            (f"{row.kl.mean:.1e}", f"{row.kept:.2f}×", f"{row.ttft:.2f}×"),
            100 * row.recomputed,
        )
        for row in rows
    ]
    shares, columns = ("accuracy", "agreement", "flip-recover"), ("KL", "kept", "TTFT")
    return Measured(_title(made, scores), shares, tuple(ways), columns, "recomputed, %")


def _title(made: Submission, scores: Scores) -> str:
    system = made.system
    return f"{system['name']}, {system['model']} ({system['dtype']}): {scores.items} items, all traces"


def _interval(value: Any) -> tuple[str, str]:
    known = value.mean == value.mean
    return (f"{value.mean:.3f}", f"{value.low:.3f}..{value.high:.3f}") if known else ("", "")
