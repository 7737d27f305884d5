"""``kamera serve``: OpenAI's and Anthropic's APIs, in front of conversations that keep their caches."""

from __future__ import annotations

import ipaddress
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.models import load_backbone
from kamera.cli.options import Device, Dtype, Model, Precision, Quiet
from kamera.cli.store_options import size
from kamera.sessions import SessionMode
from kamera.window import ReusePolicy


class Policy(str, Enum):
    """The reuse policies of `ReusePolicy`; under "streaming" what stays when content leaves is kept."""

    exact = "exact"
    balanced = "balanced"
    streaming = "streaming"


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    store: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Directory of chunks and sessions (default: memory only)."),
    ] = None,
    policy: Annotated[Policy, typer.Option(help="The least guarantee that is served.")] = Policy.balanced,
    keys: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File of API keys: a tenant and its key in each line."
        ),
    ] = None,
    max_bytes: Annotated[
        int, typer.Option(metavar="SIZE", parser=size, help="Most bytes of sessions in memory.")
    ] = "8GiB",  # type: ignore[assignment]  # typer parses defaults, too
    name: Annotated[
        list[str] | None,
        typer.Option(help="A name of the model for clients (default: MODEL); again for more."),
    ] = None,
    device: Device = None,
    dtype: Precision = Dtype.auto,
    quiet: Quiet = False,
) -> None:
    """Serve /v1/chat/completions, /v1/responses and /v1/messages; an agent changes its URL only.

    Prints one line with the address when it is ready. SIGTERM and Ctrl-C finish what runs, save, and say so.
    """
    try:
        from kamera import serve as serving
    except ImportError:
        raise ValueError(
            "kamera serve needs starlette, uvicorn and sse-starlette: pip install 'kamera[serve]'"
        ) from None

    held = serving.Keys({} if keys is None else read_keys(keys))
    if not held and not _is_local(host):
        raise ValueError(f"--host {host} lets others in: give --keys FILE, or listen on 127.0.0.1")
    listening = serving.bound(host, port)
    backbone = load_backbone(model, device, dtype, show_progress=not quiet)
    chosen = {
        "exact": ReusePolicy.exact,
        "balanced": ReusePolicy.balanced,
        "streaming": ReusePolicy.streaming,
    }
    mode: SessionMode = "amortize" if policy is Policy.streaming else "auto"
    service = serving.Service(backbone, chosen[policy.value](), mode=mode, store=store, max_bytes=max_bytes)
    serving.run(serving.Front(service, held, name or [model]), listening)


def read_keys(path: Path) -> dict[str, str]:
    """Tenants by key, from a file with a tenant and its key in each line; a tenant may have several.

    Raises ValueError for another line, a short key, or one that two tenants have.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < 16 or words[1] in found:
            raise ValueError(f"{path}:{number}: give a tenant and a key of its own, of 16 characters or more")
        found[words[1]] = words[0]
    if not found:
        raise ValueError(f"{path} has no keys: give a tenant and its key in each line")
    return found


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
