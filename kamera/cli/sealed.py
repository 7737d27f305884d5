"""Options for stores of tenants with a secret: secret and keys come from files.

Never from arguments, which every user of the machine can read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", exists=True, dir_okay=False, help="The tenant's secret: all bytes of a file."
    ),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        exists=True,
        dir_okay=False,
        help="A file of 32 bytes that encrypts; the one to write with first, older ones behind it.",
    ),
]
