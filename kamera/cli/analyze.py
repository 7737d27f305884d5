"""``kamera analyze``: measures possible reuse in recorded requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kamera.cli.options import File, Form, Format, Quiet
from kamera.cli.output import Output, listing

analyze = typer.Typer(
    help="Measure possible reuse; nothing is served.", no_args_is_help=True, rich_markup_mode=None
)

_COLUMNS = ("rule", "service", "requests", "tokens", "exact prefix %", "recovered %", "novel %")


@analyze.callback()
def _root() -> None:
    """Measure possible reuse; nothing is served."""


@analyze.command("recovery")
def recovery(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            exists=True,
            dir_okay=False,
            help="OpenTelemetry GenAI spans, JSON or JSON lines.",
        ),
    ],
    rule: Annotated[
        list[str] | None, typer.Option(help="Cut rule; give it again for more, or 'every' for all.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A tokenizer.json; without one, words count."),
    ] = None,
    media_tokens: Annotated[int, typer.Option(min=1, help="Tokens a picture counts as.")] = 1024,
    sink: Annotated[
        int, typer.Option(min=0, help="Tokens at a prompt's start that are always prefilled.")
    ] = 32,
    skip_holes: Annotated[
        bool, typer.Option("--skip-holes", help="Leave out requests whose prompt is incomplete in the trace.")
    ] = False,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Count the tokens of a trace's requests that were seen before: exact prefix, recovered, novel.

    Each request is compared with all earlier ones, of every session. Nothing is run or stored.
    """
    from kamera.reuse import ContentIndex, Observer, Recovery, Scope
    from kamera.reuse.otel import read_calls
    from kamera.reuse.render import render
    from kamera.reuse.words import word_ids

    out = Output(format, output, quiet)
    rules = _rules(rule)
    read = read_calls(trace, skip_holes=skip_holes)
    tokenise = word_ids if tokenizer is None else _tokenise(tokenizer)
    prompts = [(call.service, render(call, tokenise, media_tokens=media_tokens)) for call in read.calls]
    rows: list[dict[str, Any]] = []
    for name, chosen in rules.items():
        observer = Observer(ContentIndex(Scope("", ""), chosen), sink=sink)
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
        "left_out": list(read.holes),
        "rules": {name: chosen.to_info() for name, chosen in rules.items()},
        "recovery": rows,
    }
    cells = [tuple(_cell(row, column) for column in _COLUMNS) for row in rows]
    title = f"{trace}: {len(prompts)} requests" + (f", {len(read.holes)} left out" if read.holes else "")
    out.write(document, [listing(title, _COLUMNS, cells)])


def _rules(asked: list[str] | None) -> dict[str, Any]:
    from kamera.reuse import DEFAULT_RULE, RULES

    names = list(RULES) if asked and "every" in asked else asked or [DEFAULT_RULE]
    unknown = [name for name in names if name not in RULES]
    if unknown:
        raise typer.BadParameter(f"rule {unknown[0]!r} is none of {', '.join(RULES)}, every")
    return {name: RULES[name] for name in names}


def _tokenise(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def _row(rule: str, service: str, counted: Any) -> dict[str, Any]:
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
