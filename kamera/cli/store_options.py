"""Common parameters of the verbs of ``kamera store``: the store, its tenant, the output."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output
from kamera.cli.place import Place, lasting
from kamera.cli.sealed import KeyFiles, SecretFile
from kamera.errors import RemoteUnavailable
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.keys import KINDS, whole_id
from kamera.store.memory import parse_size

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time: give seconds, or 30m, 12h, 7d, 4w")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def size(text: str) -> int:
    """Bytes of a size such as 512MiB; `typer.BadParameter` for anything else."""
    try:
        return parse_size(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a size: give bytes, or 512MiB, 20GiB") from None


def store_url(text: str) -> str:
    """As `lasting`; ``@FILE`` reads the url from a file, for one that contains a password."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise typer.BadParameter(f"no url can be read from it: {error}") from None
    return lasting(text)


Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        callback=store_url,
        help="A directory, file://, redis://, rediss://, s3://, gs://, obstore+file://; @FILE: its text.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", file_okay=False, help="The directory in front of a remote."),
]
Kind = Annotated[str | None, typer.Option(help=f"Only objects of a kind: {', '.join(KINDS)}.")]
Targets = Annotated[
    list[str],
    typer.Argument(metavar="OBJECT…", help="Keys, or ids of chunks for all their objects; starts suffice."),
]
Older = Annotated[
    float | None, typer.Option(metavar="TIME", parser=_duration, help="Copies older than this, e.g. 30d.")
]
Lasting = Annotated[
    float | None,
    typer.Option(metavar="TIME", parser=_duration, help="Duration, e.g. 12h or 7d (default: no limit)."),
]
MaxBytes = Annotated[
    int | None, typer.Option(metavar="SIZE", parser=size, help="Most bytes of all objects, e.g. 20GiB.")
]
Cap = Annotated[
    int | None,
    typer.Option(metavar="SIZE", parser=size, help="First limit the bytes of pinned objects."),
]
Certificates = Annotated[
    bool,
    typer.Option("--certificates/--no-certificates", help="Certificates of the backbones concerned, too."),
]


@dataclass(frozen=True)
class Asked:
    """The store and the output of a command."""

    place: Place
    out: Output

    @contextmanager
    def opened(self, *, make: bool = False) -> Iterator[ChunkStore]:
        """The store, which must exist unless ``make`` creates it.

        Raises `RemoteUnavailable` for a remote that stops answering: its objects would silently be missing
        from the result.
        """
        with self.place.open() if make else self.place.open_answering() as store:
            if make:
                StoreAdmin(store).objects.reach()
            yield store
            remote = StoreAdmin(store).stats().remote
            if remote is not None and remote.reads != "closed":
                raise RemoteUnavailable(f"{store.url} stopped answering: {remote.last_error}")


def on_store(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb(asked, …)`` as a command: STORE first, then its own parameters, then the common ones."""
    _, *own = inspect.signature(verb, eval_str=True).parameters.values()
    where, *shared = inspect.signature(_asked, eval_str=True).parameters.values()
    taken = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (where, *own, *shared)]

    def command(**given: Any) -> None:
        mine = {p.name: given.pop(p.name) for p in own}
        verb(_asked(**given), **mine)

    functools.update_wrapper(command, verb, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    del command.__wrapped__  # type: ignore[attr-defined]  # typer must see this function's own parameters
    command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in taken}
    return command


def _asked(
    store: Store,
    cache: Cache = None,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> Asked:
    place = Place(store, tenant, secret_file, tuple(key_file or ()), cache=cache)
    return Asked(place, Output(format, output, quiet))


def moment(seconds: float | None) -> str:
    """A time in UTC for people; empty for none."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def keys_of(held: ChunkStore, targets: list[str]) -> list[str]:
    """Keys of the objects of ``targets``: keys, ids of chunks (all their objects), or prefixes of either.

    Raises `AmbiguousId` for a prefix of several, `UnknownChunk` for a prefix of none.
    """
    objects = held.ls() if targets else []
    found: list[str] = []
    for target in targets:
        whole = whole_id(target, (name for i in objects for name in (i.key, i.chunk_id)), "object or chunk")
        found += [i.key for i in objects if whole in (i.key, i.chunk_id)]
    return list(dict.fromkeys(found))
