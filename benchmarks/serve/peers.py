"""Peers on one machine, with the same weights: text agents that edit their own histories, over HTTP.

Two agents read a page a step on SmolLM2 and keep the last three: older pages leave, or a placeholder takes
their place. Each step asks about one of the pages in view. Requests are equal for every system: in the
history stand the true answers, whatever a system said. Behind every third request the same one is sent
*cold*, to nothing that was kept, so that a step is held against the same system's own prefill, on a machine
that is as busy. Without ``n_cache_reuse`` llama.cpp is the plain prefix cache.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from benchmarks.price.clients import KEEP, Messages, drop_pages, replace_pages
from benchmarks.texts import documents
from benchmarks.weights import load
from kamera.engines.hf.smollm2 import smollm2_source, wheel_file

AGENTS = {"dropped": drop_pages, "replaced": replace_pages}
"""What becomes of old pages, by the name of a row."""

ANSWER, LIKELIEST, LONGEST = 8, 20, 100
"""Tokens of an answer; alternatives of its first token that are told; tokens of a page."""

WARM, EVERY = 4, 3
"""The first step that is sent cold, too, counted from 0, when a page has left; and how many lie between."""

KEYS = "peers-key-of-tenant-{}"

PEOPLE = """Anna Peter Maria Thomas Julia Robert Laura Simon Helen Oscar Clara Victor Emma Martin Alice George
Nora Frank Sarah Henry Irene Walter Lucy Daniel"""
CITIES = """Paris London Berlin Rome Madrid Vienna Tokyo Boston Chicago Dublin Moscow Sydney Toronto Lisbon
Oslo Prague Athens Cairo Dallas Munich Geneva Milan Seoul Denver"""


@dataclass(frozen=True)
class Step:
    """A request, and what the page that it asks about says."""

    messages: Messages
    answer: str


@dataclass(frozen=True)
class System:
    """A server: how it is started on a port, and what makes a request warm or cold.

    ``warm`` and ``cold`` are entries of a request's body; without ``cold`` only tokens are counted: that is
    a system whose reuse is off. ``keyed``: tenants tell cold requests apart, each with a key of its own.
    """

    name: str
    command: tuple[str, ...]
    warm: Mapping[str, Any] = field(default_factory=dict)
    cold: Mapping[str, Any] | None = None
    keyed: bool = False


@dataclass(frozen=True)
class Answer:
    """What came back: seconds to the first token, tokens run before it, the text, and the likeliest tokens
    of its first place with their log-probabilities."""

    seconds: float
    run: int
    prompt: int
    text: str
    likeliest: Mapping[str, float]


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each system and agent."""
    tokenizer = load("smollm2").processor
    found = documents(2, lambda text: tokenizer(text)["input_ids"], passages=12, longest=LONGEST)
    pages = [passage for document in found for passage in document.passages]
    if options.turns > len(pages):
        raise SystemExit(f"--turns {options.turns}: there are {len(pages)} pages")
    with tempfile.TemporaryDirectory() as scratch:
        for system in systems(options, Path(scratch)):
            for agent, rule in AGENTS.items():
                with started(system) as (url, process):  # anew: the second knows nothing of the first
                    measured = run(system, url, process, steps(pages[: options.turns], rule))
                yield {"system": system.name, "old pages": agent, "steps": options.turns, **measured}
                report.progress(f"{system.name}, {agent}: {measured}")


def systems(options: Namespace, scratch: Path) -> Iterator[System]:
    """Those whose environments are given, also with their reuse switched off, and Kamera."""
    if options.llamacpp:
        for reuse in options.reuse:
            script = str(Path(__file__).with_name("llamacpp.py"))
            name = f"llama.cpp, n_cache_reuse {reuse}"
            command = (options.llamacpp, script, str(wheel_file()), "PORT", str(reuse))
            cold = {"cache_prompt": False, "id_slot": 1} if reuse else None
            yield System(name, command, {"cache_prompt": True, "id_slot": 0}, cold)
    if options.vllm:
        serve = ("-m", "vllm.entrypoints.openai.api_server", "--model", smollm2_source(), "--port", "PORT")
        given: tuple[str, ...] = (
            "--served-model-name",
            "smollm2",
            "--dtype",
            "float32",
            "--max-model-len",
            "4096",
        )
        given += ("--enforce-eager", "--block-size", "16", "--enable-prompt-tokens-details")
        yield System("vLLM, prefix caching", (options.vllm, *serve, *given), {}, {"cache_salt": "COLD"})
        yield System("vLLM, off", (options.vllm, *serve, *given, "--no-enable-prefix-caching"))
    keys = scratch / "keys"
    keys.write_text("".join(f"tenant{i} {KEYS.format(i)}\n" for i in range(options.turns + 2)))
    kamera = (sys.executable, "-m", "kamera", "serve", "smollm2", "--port", "PORT", "--keys", str(keys))
    for mode in options.modes:  # what amortize keeps is served to its own conversation only, which has an id
        warm = {"session_id": "agent"} if mode == "amortize" else dict[str, Any]()
        yield System(f"kamera serve --mode {mode}", (*kamera, "--mode", mode), warm, {}, keyed=True)


def steps(pages: list[str], rule: Any) -> list[Step]:
    """The agent's requests. A page says where somebody lives; each asks about one of the pages in view."""
    draw = random.Random(0)
    cities = draw.sample(CITIES.split(), 24)
    names = PEOPLE.split()
    told = [f"{name} lives in {city}." for name, city in zip(names, cities, strict=True)]
    full: Messages = [
        {"role": "system", "content": "You read pages and answer questions about them."},
        {"role": "user", "content": "Read the pages one by one."},
        {"role": "assistant", "content": "Open page 1."},
    ]
    made = []
    for i, page in enumerate(pages):
        asked = max(0, i - draw.randrange(KEEP))
        text = f"Page {i + 1}:\n{told[i]}\n{page}\n\nWhere does {names[asked]} live?"
        full.append({"role": "user", "content": text})
        made.append(Step(rule(list(full)), cities[asked]))
        full.append({"role": "assistant", "content": told[asked]})
    return made


def run(system: System, url: str, process: int, asked: list[Step]) -> report.Row:
    """The agent's steps on a server; the next one comes when the server is idle."""
    warm, pairs, spent, measured = list[Answer](), list[tuple[Answer, Answer, Step]](), [0.0, 0.0], 0.0
    with httpx.Client(verify=False, timeout=600) as http:
        _answered(http, url, system, asked[0].messages[:2], len(asked) + 1)  # what a first request loads
        before = settled(process)
        for i, step in enumerate(asked):
            warm.append(_answered(http, url, system, step.messages, 0))
            measured, before = (now := settled(process)) - before, now
            if system.cold is not None and i in range(WARM, len(asked), EVERY):
                pairs.append((warm[-1], _answered(http, url, system, step.messages, i + 1), step))
                now = settled(process)
                spent = [spent[0] + measured, spent[1] + now - before]
                before = now
    counted = {
        "prompt tokens": sum(a.prompt for a in warm),
        "run before the answers": sum(a.run for a in warm),
        "right": sum(s.answer in a.text for s, a in zip(asked, warm, strict=True)),
    }
    return {**counted, **_beside(pairs, spent)} if pairs else counted


def _beside(pairs: list[tuple[Answer, Answer, Step]], spent: list[float]) -> report.Row:
    far = [divergence(cold.likeliest, warm.likeliest) for warm, cold, _ in pairs]
    assert all(cold.run == cold.prompt for _, cold, _ in pairs), "a cold request found something"
    return {
        "sent cold": len(pairs),
        "first token, of cold": round(statistics.median(w.seconds / c.seconds for w, c, _ in pairs), 3),
        "processor, of cold": round(spent[0] / spent[1], 3),
        "answers as cold": sum(warm.text == cold.text for warm, cold, _ in pairs),
        "right of these, cold": sum(step.answer in cold.text for _, cold, step in pairs),
        "KL to cold, median": round(statistics.median(far), 5),
        "KL to cold, largest": round(max(far), 4),
    }


def divergence(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    """KL(p ‖ q) in nats over the tokens that both tell, and all others as one: a lower bound."""
    both = [(math.exp(p[token]), math.exp(q[token])) for token in p if token in q]
    rest = [max(1e-9, 1 - sum(pair[i] for pair in both)) for i in range(2)]
    return max(0.0, sum(a * math.log(a / b) for a, b in [*both, (rest[0], rest[1])]))


def _answered(http: httpx.Client, url: str, system: System, messages: Messages, tenant: int) -> Answer:
    """A streamed answer; ``tenant`` 0 is the agent, every other one is cold."""
    chosen = (system.cold or {}) if tenant else system.warm
    own = {name: f"cold {tenant}" if value == "COLD" else value for name, value in chosen.items()}
    body = {"model": "smollm2", "messages": messages, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    body |= {"logprobs": True, "top_logprobs": LIKELIEST, "stream_options": {"include_usage": True}, **own}
    key = {"Authorization": f"Bearer {KEYS.format(tenant)}"} if system.keyed else {}
    began, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    likeliest: dict[str, float] = {}
    with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=key) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{system.name}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            told = json.loads(line[6:])
            usage = told.get("usage") or usage
            for choice in told["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() - began if piece else 0.0)
                text += piece
                tokens = (choice.get("logprobs") or {}).get("content") or []
                if tokens and not likeliest:
                    likeliest = {one["token"]: one["logprob"] for one in tokens[0]["top_logprobs"]}
    details = usage.get("prompt_tokens_details") or {}
    prompt = usage["prompt_tokens"]
    return Answer(first, prompt - (details.get("cached_tokens") or 0), prompt, text.strip(), likeliest)


# -- servers ---------------------------------------------------------------------------------------


@contextmanager
def started(system: System) -> Iterator[tuple[str, int]]:
    """The address of a server with one thread, in a session of processes of its own, and its id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [port if part == "PORT" else part for part in system.command]
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    threads |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env={**os.environ, **threads},
            start_new_session=True,
        )
        try:
            yield _ready(f"http://127.0.0.1:{port}", process), process.pid
        except RuntimeError:
            said.seek(0)
            report.progress(said.read().decode(errors="replace")[-2000:])
            raise
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ready(url: str, process: subprocess.Popen[bytes]) -> str:
    """The address, once the server answers. Raises RuntimeError if it ended."""
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended")
        try:
            if httpx.get(f"{url}/health", timeout=5, verify=False).status_code == 200:
                return url
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"{process.args!r} does not answer")


def settled(session: int) -> float:
    """Seconds of processor that a session of processes has spent, once it spends no more."""
    before = -1.0
    while (now := _spent(session)) > before + 0.02:
        before = now
        time.sleep(0.4)
    return now


def _spent(session: int) -> float:
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
