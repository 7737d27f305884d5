"""Agents' requests made up from a seed, as an OpenTelemetry trace: what moves in each is known.

    python -m lab.agent_traces traces.json --seed 0 [--requests 40] [--only rag …]

Patterns: ``metadata`` (a small header per agent before everything else), ``sysvar`` (a variable deep in the
system prompt), ``compaction`` (old turns become a summary), ``rerank`` (the same passages in another order),
``tools`` (the tools come in another selection and order), ``rag`` (passages drawn and shuffled anew),
``coding`` (files read again after an edit, old tool results cleared), ``screens`` (the last three screenshots
stay). The words are made up; the shapes (sentences, JSON, code, logs) and their repetitions are those of such
prompts.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Request = tuple[list[dict[str, Any]], list[Message]]

_SYLLABLES = ("ka", "ra", "mi", "to", "ne", "sol", "vin", "dar", "pe", "lu", "chi", "ros", "ten", "fa", "gor")
_TYPES = ("string", "integer", "boolean")


class Writer:
    """Text of several kinds from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._words = [
            "".join(self.draw.choices(_SYLLABLES, k=self.draw.randint(1, 4))) for _ in range(4_000)
        ]
        self._weights = [1 / (rank + 2) for rank in range(len(self._words))]  # Zipf
        self.now = 1_790_000_000

    def sentence(self) -> str:
        words = self.draw.choices(self._words, self._weights, k=self.draw.randint(6, 24))
        return " ".join(words).capitalize() + "."

    def passage(self, sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

    def name(self) -> str:
        return "_".join(self.draw.choices(self._words, k=2))

    def tool(self) -> dict[str, Any]:
        fields = {
            self.name(): {
                "type": self.draw.choice(("string", "integer", "boolean")),
                "description": self.sentence(),
            }
            for _ in range(self.draw.randint(2, 6))
        }
        parameters = {"type": "object", "properties": fields, "required": list(fields)[:2]}
        return {
            "type": "function",
            "name": self.name(),
            "description": self.passage(2),
            "parameters": parameters,
        }

    def code(self, functions: int) -> list[str]:
        lines = []
        for _ in range(functions):
            one, other, result = self.name(), self.name(), self.name()
            lines += [f"def {one}({other}: int, limit: int = {self.draw.randint(1, 99)}) -> int:"]
            lines += [f'    """{self.sentence()}"""', f"    {result} = 0", f"    for i in range({other}):"]
            lines += [f"        if i % {self.draw.randint(2, 9)} == 0:", f"            {result} += i * limit"]
            lines += [f"    return {result}", "", ""]
        return lines

    def log(self, lines: int) -> str:
        rows = []
        for _ in range(lines):
            self.now += self.draw.randint(0, 9)
            rows.append(f"{self.now} INFO {self.name()}: {self.sentence()}")
        return "\n".join(rows)

    def id(self) -> str:
        return "".join(self.draw.choices("0123456789abcdef", k=32))


def text(role: str, content: str) -> Message:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def tool_result(call: str, content: str) -> Message:
    return {"role": "tool", "parts": [{"type": "tool_call_response", "id": call, "response": content}]}


def metadata(w: Writer, count: int) -> Iterator[Request]:
    body, tools = w.passage(150), [w.tool() for _ in range(6)]
    for _ in range(count):
        skills = ", ".join(w.name() for _ in range(w.draw.randint(1, 9)))
        started = w.now + w.draw.randint(0, 9**6)
        header = f"agent: {w.name()}\nrun: {w.id()}\nstarted: {started}\nskills: {skills}\n\n"
        yield (
            [],
            [text("system", header + body + "\n" + json.dumps(tools, indent=1)), text("user", w.passage(3))],
        )


def sysvar(w: Writer, count: int) -> Iterator[Request]:
    before, after, tools = w.passage(150), w.passage(50), [w.tool() for _ in range(6)]
    for turn in range(count):
        system = f"{before}\nThe date is 2026-11-{1 + turn % 28:02d}, the user is {w.name()}.\n{after}"
        yield tools, [text("system", system), text("user", w.passage(3))]


def compaction(w: Writer, count: int) -> Iterator[Request]:
    system, tools = text("system", w.passage(60)), [w.tool() for _ in range(4)]
    history: list[Message] = []
    for turn in range(count):
        if turn % 10 == 9:
            history = [text("user", "Summary so far: " + w.passage(8)), *history[-8:]]
        history.append(text("user", w.passage(3)))
        yield tools, [system, *history]
        history += [text("assistant", w.passage(5)), tool_result(w.id(), w.log(12))]


def rerank(w: Writer, count: int) -> Iterator[Request]:
    system, passages = text("system", w.passage(30)), [w.passage(14) for _ in range(16)]
    for _ in range(count):
        w.draw.shuffle(passages)
        joined = "\n\n".join(f"[{i}] {p}" for i, p in enumerate(passages))
        yield [], [system, text("user", joined + "\n\n" + w.passage(2))]


def tools(w: Writer, count: int) -> Iterator[Request]:
    pool, system = [w.tool() for _ in range(24)], text("system", w.passage(60))
    for _ in range(count):
        yield w.draw.sample(pool, 12), [system, text("user", w.passage(4))]


def rag(w: Writer, count: int) -> Iterator[Request]:
    pool, system = [w.passage(w.draw.randint(6, 24)) for _ in range(40)], text("system", w.passage(20))
    for _ in range(count):
        drawn = [tool_result(w.id(), p) for p in w.draw.sample(pool, 8)]
        yield [], [system, text("user", w.sentence()), *drawn, text("user", w.passage(2))]


def coding(w: Writer, count: int) -> Iterator[Request]:
    kit, system = [w.tool() for _ in range(8)], text("system", w.passage(80))
    files = {f"src/{w.name()}.py": w.code(12) for _ in range(5)}
    history = [text("user", w.passage(4))]
    for _ in range(count):
        cleared = [m for m in history if m["role"] == "tool"][:-6]  # all but the last six results
        for message in cleared:
            message["parts"][0]["response"] = "[cleared]"
        yield kit, [system, *[json.loads(json.dumps(m)) for m in history]]
        path, call = w.draw.choice(list(files)), w.id()
        lines = files[path]
        lines[w.draw.randrange(len(lines))] = f"    {w.name()} = {w.draw.randint(0, 999)}"
        lines.insert(w.draw.randrange(len(lines)), f"    # {w.sentence()}")
        asked = {"type": "tool_call", "id": call, "name": "read_file", "arguments": {"path": path}}
        parts = [{"type": "text", "content": w.sentence()}, asked]
        history += [{"role": "assistant", "parts": parts}, tool_result(call, f"{path}\n" + "\n".join(lines))]


def screens(w: Writer, count: int) -> Iterator[Request]:
    kit, system = [w.tool() for _ in range(5)], text("system", w.passage(60))
    history = [text("user", w.passage(3))]
    for _ in range(count):
        yield kit, [system, *json.loads(json.dumps(history))]
        picture = base64.b64encode(w.draw.randbytes(48)).decode()
        blob = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": picture}
        acted = {
            "type": "tool_call",
            "id": w.id(),
            "name": "click",
            "arguments": {"x": w.draw.randint(0, 1_919)},
        }
        said = {"type": "text", "content": w.passage(2)}
        history += [{"role": "assistant", "parts": [said, acted]}, {"role": "tool", "parts": [blob]}]
        shown = [m for m in history if m["parts"][0]["type"] == "blob"]
        for message in shown[:-3]:
            message["parts"] = [{"type": "text", "content": "[Image omitted to conserve context]"}]


PATTERNS: dict[str, Callable[[Writer, int], Iterator[Request]]] = {
    f.__name__: f for f in (metadata, sysvar, compaction, rerank, tools, rag, coding, screens)
}


def trace(seed: int = 0, requests: int = 40, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """An OTLP/JSON document: one service for each pattern, one span for each request."""
    resources = []
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        if only and name not in only:
            continue
        writer = Writer(1_000 * seed + number)
        spans = [
            _span(writer, turn, kit, messages)
            for turn, (kit, messages) in enumerate(pattern(writer, requests))
        ]
        resource = {"attributes": [_attribute("service.name", name)]}
        resources.append({"resource": resource, "scopeSpans": [{"spans": spans}]})
    return {"resourceSpans": resources}


def _span(writer: Writer, turn: int, kit: list[dict[str, Any]], messages: list[Message]) -> dict[str, Any]:
    attributes = [
        _attribute("gen_ai.operation.name", "chat"),
        _attribute("gen_ai.request.model", "made-up"),
        _attribute("gen_ai.input.messages", json.dumps(messages)),
    ]
    if kit:
        attributes.append(_attribute("gen_ai.tool.definitions", json.dumps(kit)))
    start = str((1_790_000_000 + 60 * turn) * 10**9)
    return {
        "traceId": writer.id(),
        "spanId": writer.id()[:16],
        "name": "chat made-up",
        "startTimeUnixNano": start,
        "attributes": attributes,
    }


def _attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.agent_traces")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=40, help="of each pattern")
    parser.add_argument("--only", nargs="*", default=(), choices=list(PATTERNS))
    asked = parser.parse_args()
    asked.file.write_text(json.dumps(trace(asked.seed, asked.requests, tuple(asked.only))), encoding="utf-8")


if __name__ == "__main__":
    main()
