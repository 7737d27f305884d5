"""Options for stores of tenants with a secret. Secret and keys come from files, never from arguments, which
every user of the machine can read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", exists=True, dir_okay=False, help="A file whose bytes are the tenant's secret."
    ),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        exists=True,
        dir_okay=False,
        help="A file with an encryption key of 32 bytes; the current one first, then older ones.",
    ),
]
