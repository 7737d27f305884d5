"""``python -m lab.reuse VERB``: measures possible reuse in recorded requests, and on a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kamera.cli.app import run as run_program
from kamera.cli.options import File, Form, Quiet
from kamera.cli.output import Output, listing
from kamera.reuse import DEFAULT_RULE, RULES, ContentIndex, CutRule, Prompt
from lab.reuse.charts import Plot, chart
from lab.reuse.on_model import roc, sink
from lab.reuse.otel import read_calls
from lab.reuse.recovery import Observer, Recovery
from lab.reuse.render import render
from lab.reuse.shift import shift as diagnose
from lab.reuse.words import Tokenise, word_ids

program = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

_PARTS = ("exact_prefix", "recovered", "novel")
_COLUMNS = ("rule", "service", "requests", "tokens", "exact prefix %", "recovered %", "novel %")


@program.callback()
def _root() -> None:
    """Measure possible reuse; nothing is served."""


for _verb in (roc, sink):
    program.command(_verb.__name__)(_verb)

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", exists=True, dir_okay=False, help="OpenTelemetry GenAI spans, JSON or JSON lines."
    ),
]
TokenizerFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A tokenizer.json; without one, words count.")
]
MediaTokens = Annotated[int, typer.Option(min=1, help="Tokens a picture counts as.")]
Start = Annotated[int, typer.Option(min=0, help="Tokens at a prompt's start that are always prefilled.")]
SkipHoles = Annotated[
    bool, typer.Option("--skip-holes", help="Leave out requests whose prompt is incomplete in the trace.")
]


@program.command("recovery")
def recovery(
    trace: TraceFile,
    rule: Annotated[
        list[str] | None, typer.Option(help="Cut rule; give it again for more, or 'every' for all.")
    ] = None,
    tokenizer: TokenizerFile = None,
    media_tokens: MediaTokens = 1024,
    sink: Start = 32,
    skip_holes: SkipHoles = False,
    plot: Plot = None,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Count the tokens of a trace's requests that were seen before: exact prefix, recovered, novel.

    Each request is compared with all earlier ones, of every session. Nothing is run or stored.
    """
    out = Output(format, output, quiet)
    rules = _rules(rule)
    prompts, holes = _prompts(trace, tokenizer, media_tokens, skip_holes)
    rows: list[dict[str, Any]] = []
    for name, chosen in rules.items():
        observer = Observer(ContentIndex(chosen), sink=sink)
        counts: dict[str, Recovery] = {}
        for service, prompt in prompts:
            counts[service] = counts.get(service, Recovery()) + observer.observe(prompt)
        if len(counts) > 1:
            counts["(all)"] = sum(counts.values(), Recovery())
        rows += [_row(name, service, counted) for service, counted in counts.items()]
    document = {
        "trace": str(trace),
        "tokenizer": "words" if tokenizer is None else str(tokenizer),
        "media_tokens": media_tokens,
        "sink": sink,
        "left_out": holes,
        "rules": {name: asdict(chosen) for name, chosen in rules.items()},
        "recovery": rows,
    }
    cells = [tuple(_cell(row, column) for column in _COLUMNS) for row in rows]
    title = f"{trace}: {len(prompts)} requests" + (f", {len(holes)} left out" if holes else "")
    out.write(document, [listing(title, _COLUMNS, cells)])
    shares = {name: [row[name] / max(1, row["tokens"]) for row in rows] for name in _PARTS}
    chart(plot, [f"{row['rule']} {row['service']}" for row in rows], shares, "share of tokens", stacked=True)


@program.command("shift")
def shift(
    trace: TraceFile,
    rule: Annotated[str | None, typer.Option(help="Cut rule (default: the one that recovers most).")] = None,
    tokenizer: TokenizerFile = None,
    media_tokens: MediaTokens = 1024,
    sink: Start = 32,
    skip_holes: SkipHoles = False,
    plot: Plot = None,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Predict what reuse behind the prefix gains, from where requests first vary and how much is new.

    The means of each service's first requests predict the recovered share of the later ones; a service of
    fewer than three requests is left out.
    """
    out = Output(format, output, quiet)
    ((name, chosen),) = _rules(None if rule is None else [rule]).items()
    prompts, _ = _prompts(trace, tokenizer, media_tokens, skip_holes)
    by_service: dict[str, list[Prompt]] = {}
    for service, prompt in prompts:
        by_service.setdefault(service, []).append(prompt)
    rows = [
        {"service": service, **asdict(diagnose(held, chosen, sink=sink))}
        for service, held in by_service.items()
        if len(held) > 2
    ]
    columns = ("service", "requests", "first variation %", "unseen segments", "tokens each", "predicted %")
    cells = [
        (
            row["service"],
            row["requests"],
            round(100 * row["first_variation"], 1),
            round(row["variation_set"], 1),
            round(row["segment"], 1),
            round(100 * row["predicted"], 1),
            round(100 * row["measured"], 1),
        )
        for row in rows
    ]
    out.write(
        {"trace": str(trace), "rule": name, "sink": sink, "shift": rows},
        [listing(f"{trace}: gain beyond the exact prefix", (*columns, "measured %"), cells)],
    )
    lines = {key: [row[key] for row in rows] for key in ("predicted", "measured")}
    chart(plot, [row["service"] for row in rows], lines, "share of tokens")


def _prompts(
    trace: Path, tokenizer: Path | None, media_tokens: int, skip_holes: bool
) -> tuple[list[tuple[str, Prompt]], list[str]]:
    """Service and prompt of each request, and the holes that were left out."""
    read = read_calls(trace, skip_holes=skip_holes)
    tokenise = word_ids if tokenizer is None else _tokenise(tokenizer)
    calls = [(call.service, render(call, tokenise, media_tokens=media_tokens)) for call in read.calls]
    return calls, list(read.holes)


def _rules(asked: list[str] | None) -> dict[str, CutRule]:
    names = list(RULES) if asked and "every" in asked else asked or [DEFAULT_RULE]
    unknown = [name for name in names if name not in RULES]
    if unknown:
        raise typer.BadParameter(f"rule {unknown[0]!r} is none of {', '.join(RULES)}, every")
    return {name: RULES[name] for name in names}


def _tokenise(path: Path) -> Tokenise:
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def _row(rule: str, service: str, counted: Recovery) -> dict[str, Any]:
    return {
        "rule": rule,
        "service": service,
        "requests": counted.requests,
        "tokens": counted.tokens,
        "exact_prefix": counted.prefix,
        "recovered": counted.recovered,
        "novel": counted.novel,
    }


def _cell(row: dict[str, Any], column: str) -> object:
    if column.endswith(" %"):
        count = row[column.removesuffix(" %").replace(" ", "_")]
        return round(100 * count / max(1, row["tokens"]), 1)
    return row[column]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own); its exit code is that of ``kamera``."""
    return run_program(program, "python -m lab.reuse", arguments)


if __name__ == "__main__":
    sys.exit(main())
