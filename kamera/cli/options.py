"""Options that several verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from kamera.engines.hf import HfEngine, ServedModel


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype of a model's weights; ``auto`` is that of the checkpoint."""


def _usable(device: str | None) -> str | None:
    if device is None:
        return None
    from kamera.engines.hf.load import device_of

    try:
        return str(device_of(device))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def writable(path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"no folder {str(path.parent)!r}: make it first")
    return path


def size(text: str) -> int:
    """Bytes of a size such as 512MiB; `typer.BadParameter` for anything else."""
    from kamera.store import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_MODEL = (
    "Model directory or hub name; 'testbed' for the shipped one, 'smollm2' for SmolLM2-135M-Instruct, "
    "'screen-reader' for that behind a tower, tuned to answer questions about screens."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL)]
Device = Annotated[
    str | None, typer.Option(callback=_usable, help="Device of the model: cpu, cuda, cuda:1, …")
]
Precision = Annotated[Dtype, typer.Option("--dtype", help="Dtype of the weights.")]
Form = Annotated[Literal["table", "json"], typer.Option("--format", help="Format of the result.")]
File = Annotated[
    Path | None,
    typer.Option("--output", dir_okay=False, callback=writable, help="Write the result to a file instead."),
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


@dataclass(frozen=True)
class Loading:
    """Where and in which dtype a command's model is loaded."""

    device: Device = None
    dtype: Precision = "auto"

    def load(self, model: str, *, show_progress: bool) -> HfEngine:
        """The engine of a model: a directory, a hub name, or ``testbed`` for the one that ships with Kamera.

        Raises UnsupportedBackbone, with the reason, if it does not load or is refused.
        """
        from kamera.engines.hf import Backbone, hide_progress

        if not show_progress:
            hide_progress()
        return Backbone.from_pretrained(model, device=self.device, dtype=self.dtype).engine

    def open_served(self, model: str) -> ServedModel:
        """As `load`, for a model that another engine runs: no weight is loaded."""
        from kamera.engines.hf import ServedModel

        return ServedModel(model, dtype=self.dtype)


@dataclass(frozen=True)
class Owner:
    """Whose objects are used.

    Secret and keys come from files, never from arguments, which every user of the machine can read. They are
    read by the process that opens the store.
    """

    tenant: Annotated[str, typer.Option(help="The tenant whose objects are used.")] = ""
    secret_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, resolve_path=True, help="A file whose bytes are the tenant's secret."
        ),
    ] = None
    key_file: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            resolve_path=True,
            help="A file with an encryption key of 32 bytes; the current one first, then older ones.",
        ),
    ] = None
