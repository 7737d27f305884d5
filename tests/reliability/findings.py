"""What an attack found, counted by kind with a few examples; and children that end, whatever happens.

An attack's ``run`` returns `Findings.figures`: ``findings`` is their number, which has to be 0.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.reliability import rig

_EXAMPLES = 3  # of each kind


class Findings:
    """A tally of what went ``wrong`` and of what was ``done``."""

    def __init__(self) -> None:
        self.wrong: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, kind: str, example: str = "", times: int = 1) -> None:
        """``kind`` happened; nothing for 0 times."""
        if times:
            self.wrong[kind] += times
            self._remember(kind, [" ".join(example.split())[:200]] if example else [])

    def told(self) -> dict[str, Any]:
        """All of it as JSON, for `learn` in another process."""
        return {"wrong": self.wrong, "done": self.done, "examples": self._examples}

    def learn(self, told: dict[str, Any]) -> None:
        """Add what another process told."""
        self.wrong.update(told["wrong"])
        self.done.update(told["done"])
        for kind, examples in told["examples"].items():
            self._remember(kind, examples)

    def figures(self) -> dict[str, Any]:
        """``findings`` and their kinds, with examples, and what was done."""
        self.wrong += Counter()  # drops what is 0
        kinds = {k: {"times": n, "e.g.": self._examples.get(k, [])} for k, n in sorted(self.wrong.items())}
        return {"findings": self.wrong.total(), "found": kinds, "done": dict(sorted(self.done.items()))}

    def _remember(self, kind: str, examples: list[str]) -> None:
        held = self._examples.setdefault(kind, [])
        held += [example for example in examples if example not in held]
        del held[_EXAMPLES:]


class Ended(NamedTuple):
    """How a child ended: ``returned``, ``hung`` (it was ended), or ``died`` (of what, in ``why``)."""

    how: str
    why: str
    result: Any


class Child:
    """A forked process that does ``work`` (which returns what JSON can say) for at most ``seconds``.

    ``memory``: bytes of address space it may take beyond those it has when it begins.
    """

    def __init__(self, work: Callable[[], Any], seconds: float, memory: int | None = None) -> None:
        reading, writing = os.pipe()

        def bounded() -> None:
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even one that holds the GIL
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if memory is not None:
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (address_space() + memory, hard))
            try:
                told = {"result": work()}
            except BaseException as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            with open(writing, "w", encoding="utf-8") as pipe:
                json.dump(told, pipe)

        self._pid = rig.fork(bounded)
        self._pipe = reading
        os.close(writing)

    def ended(self) -> Ended:
        """Wait for its end."""
        with open(self._pipe, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            hung = number == signal.SIGALRM
            return Ended("hung" if hung else "died", signal.Signals(number).name, None)
        told = json.loads(text) if text else {"error": f"exit code {os.WEXITSTATUS(status)}"}
        if "error" in told:
            return Ended("died", told["error"], None)
        return Ended("returned", "", told["result"])


def address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
