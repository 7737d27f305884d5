"""``kamera store gc``, ``pin``, ``unpin``, ``quarantine`` and ``forget``: what stays, and what goes."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output, facts, listing, size
from kamera.cli.sealed import KeyFiles, SecretFile, opened
from kamera.cli.store import Directory, keys_of, moment
from kamera.store.memory import parse_size

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time: give seconds, or 30m, 12h, 7d, 4w")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no size: give bytes, or 512MiB, 20GiB") from None


Targets = Annotated[
    list[str],
    typer.Argument(metavar="OBJECT…", help="Keys, or ids of chunks for all their objects; starts suffice."),
]


def gc(
    directory: Directory,
    max_bytes: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=_size, help="What the objects may take, as 20GiB."),
    ] = None,
    every_tenant: Annotated[
        bool, typer.Option("--every-tenant", help="All objects, not only this tenant's, within one budget.")
    ] = False,
    quarantine_older: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=_duration, help="Also damaged copies set aside longer ago, as 30d."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Remove what saves the least recompute per byte until the rest fits; what is pinned stays.

    Patches without their canonical go always. Exit code 1 when what is pinned alone is too large.
    """
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held, out.counted("object") as progress:
        done = held.gc(
            max_bytes,
            every_tenant=every_tenant,
            quarantine_age=quarantine_older,
            dry_run=dry_run,
            progress=progress,
        )
    fits = max_bytes is None or done.bytes_after <= max_bytes
    would = "would go" if dry_run else "gone"
    rows: list[tuple[str, object]] = [
        ("before", f"{done.objects_before} objects, {size(done.bytes_before)}"),
        (would, f"{len(done.removed)} objects, {size(done.bytes_before - done.bytes_after)}"),
        ("after", f"{done.objects_after} objects, {size(done.bytes_after)}"),
        ("files of dead writers removed", done.leftovers),
        (f"copies in quarantine {would}", done.quarantined),
    ]
    if not fits:
        rows.append(("too large", f"what is pinned keeps it above {size(max_bytes or 0)}"))
    removed = [(r.key[:12], r.kind, r.bytes, f"{r.value:.3g}", r.reason) for r in done.removed]
    document = {"store": str(directory), "dry_run": dry_run, "fits": fits, **asdict(done)}
    tables = [facts(str(directory), rows)]
    if removed:
        tables.append(listing("", ("key", "kind", "bytes", "value", "why"), removed))
    out.write(document, tables)
    if not fits:
        raise typer.Exit(1)


def pin(
    directory: Directory,
    objects: Targets = [],  # noqa: B006 (typer reads it, nobody writes it)
    ttl: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=_duration, help="How long, as 12h or 7d (default: for good)."),
    ] = None,
    cap: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=_size, help="First bound what may be pinned in this store."),
    ] = None,
    no_cap: Annotated[bool, typer.Option("--no-cap", help="First lift that bound.")] = False,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Keep objects through gc, and show what is pinned. Without OBJECT only the latter."""
    out = Output(format, output, quiet)
    if no_cap and cap is not None:
        raise ValueError("--cap and --no-cap exclude each other")
    with opened(directory, tenant, secret_file, key_file) as held:
        keys = keys_of(held, objects)
        if no_cap or cap is not None:
            held.pins.set_cap(cap)
        if keys:
            held.pin(keys, ttl)
        pins, bound = held.pins.list(), held.pins.cap
    document = {"store": str(directory), "cap": bound, "pins": [asdict(p) for p in pins]}
    of = "" if bound is None else f" of at most {size(bound)}"
    title = f"{directory}: {len(pins)} objects pinned, {size(sum(p.bytes for p in pins))}{of}"
    rows = [(p.name[:12], p.bytes, moment(p.expires) or "for good") for p in pins]
    out.write(document, [listing(title, ("key", "bytes", "until (UTC)"), rows)])


def unpin(
    directory: Directory,
    objects: Targets,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Let gc take objects again. Exit code 0 also when they were not pinned."""
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held:
        pinned = [p.name for p in held.pins.list()]
        keys: list[str] = []
        for target in objects:  # a pin may have outlived its object
            names = [name for name in pinned if name.startswith(target)]
            keys += names if len(names) == 1 else keys_of(held, [target])
        count = held.unpin(keys)
        left = len(held.pins.list())
    out.write(
        {"store": str(directory), "unpinned": count, "pinned": left},
        [facts(str(directory), [("unpinned", count), ("still pinned", left)])],
    )


def quarantine(
    directory: Directory,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Delete a copy (its file) or all copies of an object."),
    ] = None,
    older: Annotated[
        float | None, typer.Option(metavar="TIME", parser=_duration, help="Delete copies older than, as 30d.")
    ] = None,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Show the damaged copies that were set aside, and why; they are never served. Deletes only on demand."""
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held:
        names = list(drop or ())
        if older is not None:
            names += [copy.file for copy in held.quarantined() if copy.when < time.time() - older]
        dropped = sum(held.drop_quarantined(name) for name in dict.fromkeys(names))
        copies = held.quarantined()
    rows = [(copy.file, copy.bytes, moment(copy.when), copy.reason) for copy in copies]
    title = f"{directory}: {len(copies)} damaged copies" + (f", {dropped} deleted" if dropped else "")
    document = {"store": str(directory), "dropped": dropped, "copies": [asdict(copy) for copy in copies]}
    out.write(document, [listing(title, ("file", "bytes", "set aside (UTC)", "why"), rows)])


def forget(
    directory: Directory,
    chunk: Annotated[str, typer.Argument(metavar="CHUNK", help="The whole id of a chunk.")],
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Remove all that was made of a chunk, look again, and say what is left of it.

    Exit code 1 when something is left.
    """
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held:
        done = held.forget(chunk)
    rows: list[tuple[str, object]] = [
        ("objects removed", len(done.removed)),
        ("damaged copies removed", done.copies),
        ("left", len(done.left)),
    ]
    lines = [f"left: {line}" for line in done.left]
    out.write({"store": str(directory), **asdict(done)}, [facts(chunk, rows), *lines])
    if done.left:
        raise typer.Exit(1)
