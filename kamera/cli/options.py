"""Options that several verbs share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kamera.store.keys import KVForm


class Format(str, Enum):
    """Format of a result."""

    table = "table"
    json = "json"


class Dtype(str, Enum):
    """Dtype of a model's weights; ``auto`` is that of the checkpoint."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Held(str, Enum):
    """Form of stored canonicals: `kamera.store.keys.KV_FORMS`."""

    as_is = "as-is"
    int8 = "int8"
    int4 = "int4"

    @property
    def form(self) -> KVForm:
        """The argument of `ChunkStore.open`."""
        from kamera.store.keys import KV_FORMS

        return next(form for form in KV_FORMS if form == self.value)


def _usable(device: str | None) -> str | None:
    if device is None:
        return None
    from kamera.engines.hf.load import device_of

    try:
        return str(device_of(device))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _writable(path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"no folder {str(path.parent)!r}: make it first")
    return path


KVHeld = Annotated[
    Held,
    typer.Option("--kv", help="Form of stored KV: as it is, or in codes, which are never exact."),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model directory or hub name; 'testbed' for the shipped one.")
]
Device = Annotated[
    str | None, typer.Option(callback=_usable, help="Device of the model: cpu, cuda, cuda:1, …")
]
Precision = Annotated[Dtype, typer.Option("--dtype", help="Dtype of the weights.")]
Tenant = Annotated[str, typer.Option(help="The tenant whose objects are used.")]
Form = Annotated[Format, typer.Option("--format", help="Format of the result.")]
File = Annotated[
    Path | None,
    typer.Option("--output", dir_okay=False, callback=_writable, help="Write the result to a file instead."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no notes on stderr.")]
ArmModules = Annotated[
    list[str] | None,
    typer.Option(
        "--arm-module",
        metavar="MODULE",
        help="Importable module with more arms (a mapping ARMS); give it again for more.",
    ),
]
PatchBytes = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Largest patch as a share of the chunk's KV bytes; 0: only the rank limits it.",
    ),
]
