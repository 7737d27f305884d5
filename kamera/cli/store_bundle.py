"""``kamera store export`` and ``import``: objects and certificates from store to store in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output, facts, size
from kamera.cli.sealed import KeyFiles, SecretFile, opened

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A store directory.")]
Certificates = Annotated[
    bool,
    typer.Option("--certificates/--no-certificates", help="Certificates of the backbones concerned, too."),
]


def export_bundle(
    directory: Directory,
    bundle: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="The bundle to write.")],
    chunk: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this chunk; may be given several times.")
    ] = None,
    certificates: Certificates = True,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Write a store's objects to one file, in plain. Exit code 1 when some could not be read."""
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as store, out.counted("object") as progress:
        done = store.export_bundle(bundle, chunk, certificates=certificates, progress=progress)
    rows: list[tuple[str, object]] = [
        ("bytes", size(done.bytes)),
        ("canonicals", done.canonicals),
        ("patches", done.patches),
    ]
    rows += [("certificates", done.certificates), *(("refused", line) for line in done.refused)]
    out.write(asdict(done), [facts(done.path, rows)])
    if done.refused:
        raise typer.Exit(1)


def import_bundle(
    directory: Directory,
    bundle: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A bundle.")],
    certificates: Certificates = True,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Take a bundle into a store, which is made if need be. Exit code 1 when some of it was refused."""
    out = Output(format, output, quiet)
    with (
        opened(directory, tenant, secret_file, key_file, make=True) as store,
        out.counted("object") as progress,
    ):
        done = store.import_bundle(bundle, certificates=certificates, progress=progress)
    rows: list[tuple[str, object]] = [
        ("canonicals", done.canonicals),
        ("patches", done.patches),
        ("certificates", done.certificates),
    ]
    rows += [("here already", done.present), *(("refused", line) for line in done.refused)]
    out.write({"path": str(bundle), **asdict(done)}, [facts(str(directory), rows)])
    if done.refused:
        raise typer.Exit(1)
