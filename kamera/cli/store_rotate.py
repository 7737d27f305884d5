"""``kamera store rotate``: an encrypted store brought under a new key."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output, facts
from kamera.cli.sealed import KeyFiles, SecretFile, opened
from kamera.cli.store_bundle import Directory


def rotate(
    directory: Directory,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Write every object of a tenant again under the first key; the others are read with.

    Exit code 1 when some could not be read: then the older keys are still needed.
    """
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as store:
        done = store.rotate()
    rows: list[tuple[str, object]] = [("written again", done.rewritten), ("as they were", done.current)]
    rows += [("refused", line) for line in done.refused]
    out.write({"store": str(directory), **asdict(done)}, [facts(str(directory), rows)])
    if done.refused:
        raise typer.Exit(1)
