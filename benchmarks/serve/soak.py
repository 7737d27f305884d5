"""A server of its own process under sixteen clients who hang up, take edits back, and kill it.

Each client talks in a conversation of its own over the shipped backbone. At each turn it goes on, hangs up in
the middle of the answer and asks again, takes its last turn back, or rewords it. Twice the server is killed
(SIGKILL) and started on the same store; who was answered by then goes on from its last turn by that turn's
name alone. Every answer is compared with plain transformers', in fp32.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx

from benchmarks import report
from benchmarks.serve.edits import Messages
from benchmarks.serve.peers import System, started
from kamera import testbed
from kamera.content import Conversations, own_messages
from kamera.engines.hf import HfEngine

CLIENTS, TOKENS, LONGEST = 16, 4, 9
"""Clients; tokens of an answer; messages after which a conversation begins anew."""

SHARES = {"go on": 0.55, "hang up": 0.15, "undo": 0.15, "reword": 0.15}
KILLED = (0.8, 0.9)
"""Shares of the requests after which the server is killed."""

WARM = 0.4
"""Share of the requests after which memory is watched, until the first kill."""

_CHAT = "/v1/chat/completions"


class Soak:
    """All clients, what they were answered, and the server's memory at each answer."""

    def __init__(self, store: Path, requests: int, seed: int) -> None:
        command = [sys.executable, "-m", "kamera", "serve", "testbed", "--port", "PORT", "-q"]
        self._system = System("kamera", (*command, "--store", str(store)))
        self.requests, self.seed = requests, seed
        self._server, self._url, self._process = contextlib.ExitStack(), "", 0
        self.answers: list[tuple[Messages, str]] = []
        self.counts: Counter[str] = Counter()
        self.memory: list[tuple[int, int, float]] = []  # life of the server, number of the answer, MiB
        self.lives = 0
        self.turns: dict[int, tuple[str, Messages]] = {}  # of each client the last one: name, and all of it
        self._lock = threading.Lock()
        self._up = threading.Condition()
        self._is_up, self._busy = True, 0
        self._http = httpx.Client(verify=False, timeout=300, limits=httpx.Limits(max_connections=2 * CLIENTS))

    def run(self) -> None:
        """Send all requests, and kill the server twice on the way."""
        self._start()
        clients = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        for share in KILLED:
            while len(self.answers) < share * self.requests and any(c.is_alive() for c in clients):
                time.sleep(0.05)
            with self._up:
                self._is_up = False
                self._server.close()  # it kills
                self._up.wait_for(lambda: not self._busy)  # who was being answered has noticed
                self._start()
                self.lives += 1
                self._go_on()
                self._is_up = True
                self._up.notify_all()
        for client in clients:
            client.join()
        self._server.close()

    def _start(self) -> None:
        self._url, self._process = self._server.enter_context(started(self._system))

    def _go_on(self) -> None:
        """From each client's last acknowledged turn, by its name alone."""
        for name, talked in list(self.turns.values()):
            asked = {"role": "user", "content": "and once more?"}
            body = {**_body([asked]), "kamera": {"after": name}}
            answer = self._http.post(self._url + _CHAT, json=body)
            self.counts["turns gone on from"] += 1
            if answer.status_code != 200:
                self.counts["turns lost"] += 1
                continue
            self.answers.append(([*talked, asked], answer.json()["choices"][0]["message"]["content"]))

    def _client(self, number: int) -> None:
        draw, messages = random.Random(self.seed * 1000 + number), _opening(number)
        session = {"session_id": f"client-{number}"} if number % 2 else {}
        while len(self.answers) < self.requests:
            what = draw.choices([*SHARES], [*SHARES.values()])[0]
            if what == "undo" and len(messages) > 3:
                messages = [*messages[:-3], messages[-1]]
            elif what == "reword" and len(messages) > 3:
                messages = [*messages[:-3], _user(draw), *messages[-2:]]
            if what == "hang up":
                self._ask(messages, session, hangs_up=True)
                self.counts["hung up"] += 1
            answer = self._ask(messages, session)
            if answer is None:
                continue  # the server was killed: the same again
            text = answer["choices"][0]["message"]["content"]
            talked = [*messages, {"role": "assistant", "content": text}]
            with self._lock:
                self.counts[what] += 1
                self.answers.append((messages, text))
                self.turns[number] = answer["kamera"]["turn_id"], talked
                self.memory.append((self.lives, len(self.answers), _memory(self._process)))
                if len(self.answers) % 50 == 0:
                    report.progress(f"{len(self.answers)} answers, {self.memory[-1][2]:.0f} MiB")
            messages = [*talked, _user(draw)] if len(talked) < LONGEST else _opening(draw.randrange(10**6))

    def _ask(self, messages: Messages, session: dict[str, str], *, hangs_up: bool = False) -> Any:
        """An answer; None for one that was not waited for, or if the server died meanwhile."""
        with self._up:
            self._up.wait_for(lambda: self._is_up)
            self._busy += 1
            url = self._url + _CHAT
        body = {**_body(messages), **session}
        try:
            if not hangs_up:
                answer = self._http.post(url, json=body)
                answer.raise_for_status()
                return answer.json()
            body |= {"stream": True, "max_tokens": 100}
            with self._http.stream("POST", url, json=body) as stream:
                next(stream.iter_lines())
            return None
        except (httpx.TransportError, StopIteration):
            self.counts["broken off"] += 1
            return None
        finally:
            with self._up:
                self._busy -= 1
                self._up.notify_all()


def _body(messages: Messages) -> dict[str, Any]:
    return {"model": "testbed", "max_tokens": TOKENS, "temperature": 0, "messages": messages}


def _user(draw: random.Random) -> dict[str, Any]:
    return {"role": "user", "content": f"value of tag {draw.randrange(40)}?"}


def _opening(number: int) -> Messages:
    asked = f"camera {number}: value of tag {number % 40}?"
    return [{"role": "system", "content": testbed.SYSTEM}, {"role": "user", "content": asked}]


def _memory(process: int) -> float:
    """Resident MiB; 0 of a process that was killed."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    return 0.0


def rows(options: Namespace) -> Iterator[report.Row]:
    """One row: what was sent, what was wrong or lost, and how memory grew while one server lived."""
    with tempfile.TemporaryDirectory() as place:
        soak = Soak(Path(place) / "store", options.requests, seed=0)
        soak.run()
    report.progress("plain transformers answers the same")
    model, processor = testbed.load()
    backbone, wrong, plain = HfEngine(model, processor), 0, dict[str, str]()
    conversations = Conversations(processor)
    for messages, text in soak.answers:
        key = repr(messages)
        if key not in plain:
            whole = conversations.whole(own_messages(messages))
            ids = backbone.plain.generate(whole, max_new_tokens=TOKENS, do_sample=False)[0]
            plain[key] = processor.tokenizer.decode(ids, skip_special_tokens=True)
        wrong += plain[key].strip() != text.strip()
    watched = [(n, mib) for life, n, mib in soak.memory if life == 0 and mib and n > WARM * options.requests]
    numbers, memory = zip(*watched, strict=True)
    yield {
        "clients": CLIENTS,
        "answers": len(soak.answers),
        **{name: soak.counts[name] for name in (*SHARES, "hung up", "broken off")},
        "killed": len(KILLED),
        "turns gone on from": soak.counts["turns gone on from"],
        "turns lost": soak.counts["turns lost"],
        "answers that differ": wrong,
        "MiB": round(memory[-1]),
        "more, a hundred answers": round(100 * linear_regression(numbers, memory).slope, 2),
    }
