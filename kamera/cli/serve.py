"""``kamera serve``: OpenAI's and Anthropic's APIs, in front of conversations that keep their caches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from kamera.cli.command import command
from kamera.cli.options import Loading, Model, size
from kamera.cli.output import Output
from kamera.engines import Completes
from kamera.engines.hf import SHIPPED
from kamera.trust import ReusePolicy


@command
def serve(
    model: Model,
    loading: Loading,
    out: Output,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    store: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Directory of chunks and sessions (default: memory only)."),
    ] = None,
    mode: Annotated[
        Literal["auto", "amortize", "repair", "forget"],
        typer.Option(
            help="What becomes of content behind an edit: prefilled (auto, forget), kept (amortize), "
            "or given its stored patch (repair)."
        ),
    ] = "auto",
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
        typer.Option(
            help="A name of the model for clients (default: MODEL, a path's end); repeat it for more."
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option(metavar="SIZE", parser=size, help="Most bytes of a request's body.")
    ] = "32MiB",  # type: ignore[assignment]
    max_messages: Annotated[int, typer.Option(min=1, help="Most messages of a request.")] = 10_000,
    max_pixels: Annotated[
        int, typer.Option(min=1, help="Most pixels of all pictures of a request, as their files have them.")
    ] = 400_000_000,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse", help="Find what any conversation of a tenant has sent before, wherever it stands now."
        ),
    ] = False,
    minimum: Annotated[
        Literal["exact", "patched", "orbit", "survivor", "near", "blind"] | None,
        typer.Option(help="The weakest KV that is served (default: exact; survivor with --reuse)."),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that a prompt shares with a session that it is an edit of.")
    ] = 100,
    max_sessions: Annotated[int, typer.Option(min=1, help="Most sessions in memory.")] = 64,
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests", help="Write a line for each request: how it was matched, what was served."
        ),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="vLLM's server, which answers; MODEL is the folder it serves, --store its connector's.",
        ),
    ] = None,
) -> None:
    """Serve /v1/chat/completions, /v1/responses and /v1/messages; only an agent's URL changes.

    / is a live page of what it does. Writes one line with the address when it is ready. On SIGTERM and
    Ctrl-C it finishes running requests, saves, and writes one more line.
    """
    try:
        from kamera import serve as serving
    except ImportError:
        raise ValueError(
            "kamera serve needs starlette, uvicorn and sse-starlette: pip install 'kamera-kv[serve]'"
        ) from None

    limits = serving.Limits(body=max_body, messages=max_messages, pixels=max_pixels)
    tenants = serving.Keys({} if keys is None else read_keys(keys))
    if keys is None and host not in serving.LOCAL:
        raise ValueError(f"--host {host} lets others in: give --keys FILE, or listen on 127.0.0.1")
    if engine is not None and (reuse or minimum is not None):
        raise ValueError(f"--engine {engine} answers by recipes: --reuse and --minimum are of a model here")
    if engine is not None and store is None:
        raise ValueError(f"--engine {engine} has a store of its own: give it as --store")
    peer = None if engine is None else over_http(engine)
    listener = serving.bind_socket(host, port)
    shows = out.shows_progress
    backbone = loading.load(model, show_progress=shows) if peer is None else loading.open_served(model)
    policy = None
    if minimum is not None:
        policy = ReusePolicy(minimum, max_divergence=1.0 if minimum in ("near", "blind") else None)
    service = serving.Service(
        backbone,
        policy,
        mode=mode,
        store=store,
        max_bytes=max_bytes,
        engine=peer,
        reuse=reuse,
        min_tokens=min_tokens,
        max_sessions=max_sessions,
    )
    if log_requests:
        log = logging.getLogger("kamera.sessions")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    front = serving.Front(service, tenants, name or [name_of(model)], limits=limits)
    with out.lines() as write:
        serving.run(front, listener, lambda told: write(*told))


def name_of(model: str) -> str:
    """What clients call a model: a hub's name is whole, and of a path its end."""
    path = Path(model).expanduser()
    return path.absolute().name if path.exists() and model != SHIPPED else model


def over_http(url: str) -> Completes:
    """The engine behind a server of vLLM. Raises ValueError where none answers."""
    try:
        from openai import OpenAI, OpenAIError
    except ImportError:
        raise ValueError("kamera serve --engine needs OpenAI's client: pip install openai") from None
    from kamera.engines.vllm.clients import Http

    client = OpenAI(base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key="none")
    try:
        return Http(client, next(iter(client.models.list())).id)
    except (OpenAIError, StopIteration) as error:
        raise ValueError(f"--engine {url}: no model is served there ({type(error).__name__})") from None


def read_keys(path: Path) -> dict[str, str]:
    """Tenants by key, from a file with a tenant and its key in each line; a tenant may have several.

    Raises ValueError for another line, a short key, or one that two tenants have.
    """
    tenants: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < 16 or words[1] in tenants:
            raise ValueError(f"{path}:{number}: give a tenant and a key of its own, of 16 characters or more")
        tenants[words[1]] = words[0]
    if not tenants:
        raise ValueError(f"{path} has no keys: give a tenant and its key in each line")
    return tenants
