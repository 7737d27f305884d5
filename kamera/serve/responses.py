"""``/v1/responses``: OpenAI's responses, whose turns are kept, continued and deleted by id."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

from kamera.content import (
    Fields,
    Message,
    choose_tools,
    hint_of,
    response_format,
    response_items,
    response_logprobs,
    tool_of,
)
from kamera.errors import InvalidRequest, UnknownTurn, quote
from kamera.serve.dialect import HARMLESS, Asked, Dialect, Events, Said, common
from kamera.serve.refusal import Refusal

_log = logging.getLogger(__name__)

KEPT = 4096
"""Responses that are kept, of all tenants."""

_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {},
    "stream_options": {"include_obfuscation": (True, False)},
}
"""Objects that may be there, if they ask for what is done anyway."""

_FILE, _PATIENCE = "responses.sqlite", 10  # seconds for another process that writes
_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses "
    "(at INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT, name TEXT, document TEXT, UNIQUE (tenant, name))"
)


class Documents:
    """The last responses by tenant and id, in a file of ``folder``, or without one in memory. Thread-safe.

    A file that is damaged, or cannot be written, is named in the log: its responses are unknown then.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._lock, self._file = threading.Lock(), None if folder is None else folder / _FILE
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            _log.warning("the responses in %s are lost (%s): it is made anew", self._file, error)
            assert self._file is not None
            self._file.unlink()
            self._db = self._open()

    def get(self, tenant: str, name: str) -> dict[str, Any]:
        """A response. Raises UnknownTurn for one that was deleted or never kept."""
        rows = self._run("SELECT document FROM responses WHERE tenant = ? AND name = ?", tenant, name)
        if not rows:
            message = f"{quote(name)} is not here: it was deleted, or not kept; send the whole history"
            raise UnknownTurn(message)
        document: dict[str, Any] = json.loads(rows[0][0])
        return document

    def keep(self, tenant: str, document: dict[str, Any]) -> None:
        """Keep a response."""
        row = (tenant, document["id"], json.dumps(document))
        self._run("INSERT OR REPLACE INTO responses (tenant, name, document) VALUES (?, ?, ?)", *row)
        self._run("DELETE FROM responses WHERE at <= (SELECT max(at) FROM responses) - ?", KEPT)

    def drop(self, tenant: str, name: str) -> None:
        """Forget a response."""
        self._run("DELETE FROM responses WHERE tenant = ? AND name = ?", tenant, name)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _open(self) -> sqlite3.Connection:
        where = ":memory:" if self._file is None else self._file
        db = sqlite3.connect(where, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        for line in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", _TABLE):
            db.execute(line)
        return db

    def _run(self, line: str, *values: Any) -> list[Any]:
        with self._lock:
            try:
                return self._db.execute(line, values).fetchall()
            except sqlite3.Error as error:
                _log.warning("responses cannot be kept in %s, or read: %s", self._file, error)
                return []


class Responses(Dialect):
    """A response."""

    prefix = "resp_"

    def __init__(self, body: Fields, session: str | None, documents: Documents, tenant: str) -> None:
        self._documents, self._tenant = documents, tenant
        self._before = body.take("previous_response_id", str)
        self._kept = body.take("store", bool, True)
        text, instructions = body.text("input"), body.take("instructions", str)
        new: list[Message] = [{"role": "user", "content": text}]
        if text is None:
            new = [*response_items(body.objects("input", needed=True))]
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        shared = common(body, session, 2)
        if self._before is not None:
            shared |= self._behind(self._before, instructions)
        choice = {"tool_choice": body.get("tool_choice", "auto")}
        choice |= {"parallel_tool_calls": body.get("parallel_tool_calls", True)}
        choice |= {"text": body.get("text", {"format": {"type": "text"}})}
        asked = Asked(
            messages=[*system, *new],
            format=response_format(body),
            max_tokens=body.count("max_output_tokens"),
            logprobs=response_logprobs(body),
            hint=hint_of(body),
            **choose_tools(body, [tool_of(t, "parameters") for t in body.objects("tools")], False),
            **shared,
        )
        self._echo = {"instructions": instructions, "metadata": body.take("metadata", dict, {}), **choice}
        body.accept_only(truncation=("auto", "disabled"), background=False)
        for harmless, kind in (("max_tool_calls", int), *HARMLESS):
            body.take(harmless, kind)
        for name, allowed in _EMPTY.items():
            part = body.take_object(name, absent=True)
            part.accept_only(**allowed)
            part.finish()
        super().__init__(body, asked)
        self._sent = 0
        self._item = self.id.replace("resp", "msg")

    def whole_answer(self, said: Said) -> dict[str, Any]:
        """A ``response``; it is kept, unless the request said not to."""
        prompt, cached, completion = said.turn.usage
        usage: dict[str, Any] = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}}
        usage |= {"output_tokens": completion, "output_tokens_details": {"reasoning_tokens": 0}}
        usage["total_tokens"] = prompt + completion
        cut = said.turn.finish_reason == "length"
        output = [self._message([_part(said)]), *map(_call, said.calls)]
        document = self._document("incomplete" if cut else "completed", output)
        document |= {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}
        document |= {"usage": usage, "kamera": said.kamera}
        if self._kept:
            self._documents.keep(self._tenant, document)
        return document

    def opening_events(self) -> Events:
        """The response and its message, both empty."""
        document = self._document("in_progress", [])
        message = {**self._message([]), "status": "in_progress"}
        return [
            self._event("created", response=document),
            self._event("in_progress", response=document),
            self._event("output_item.added", output_index=0, item=message),
            self._event("content_part.added", **self._place, part=_part()),
        ]

    def piece_events(self, text: str) -> Events:
        return [self._event("output_text.delta", **self._place, delta=text, logprobs=[])]

    def closing_events(self, said: Said) -> Events:
        """The end of the message, the calls, and the whole response."""
        whole = self.whole_answer(said)
        message, *calls = whole["output"]
        events = [
            self._event("output_text.done", **self._place, text=said.content, logprobs=said.logprobs or []),
            self._event("content_part.done", **self._place, part=_part(said)),
            self._event("output_item.done", output_index=0, item=message),
        ]
        for index, item in enumerate(calls, start=1):
            place = {"output_index": index, "item_id": item["id"]}
            added, text = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
            events += [
                self._event("output_item.added", output_index=index, item=added),
                self._event("function_call_arguments.delta", **place, delta=text),
                self._event("function_call_arguments.done", **place, arguments=text, name=item["name"]),
                self._event("output_item.done", output_index=index, item=item),
            ]
        return [*events, self._event(whole["status"], response=whole)]

    def error_events(self, refusal: Refusal) -> Events:
        error = {"code": refusal.type, "message": refusal.message}
        return [self._event("failed", response={**self._document("failed", []), "error": error})]

    def _behind(self, name: str, instructions: str | None) -> dict[str, Any]:
        """What goes on from a response; its instructions do not."""
        try:
            before = self._documents.get(self._tenant, name)
        except UnknownTurn as error:
            raise InvalidRequest(str(error), "previous_response_id") from None
        anew = instructions is None and before["instructions"] is not None
        return {"after": before["kamera"]["turn_id"], "anew": anew}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **data}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        made = {"id": self._item, "type": "message", "role": "assistant", "status": "completed"}
        return {**made, "content": content}

    def _document(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self.asked
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        told = {"max_output_tokens": asked.max_tokens, "temperature": asked.temperature, "top_p": asked.top_p}
        tools = [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools]
        said = {"model": self.model, "output": output, "error": None, "previous_response_id": self._before}
        return {
            **head,
            **said,
            **told,
            "truncation": "disabled",
            **self._echo,
            "tools": tools,
            "store": self._kept,
        }


def _part(said: Said | None = None) -> dict[str, Any]:
    text, logprobs = ("", None) if said is None else (said.content, said.logprobs)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _call(made: dict[str, Any]) -> dict[str, Any]:
    head = {"type": "function_call", "id": "fc_" + made["id"].removeprefix("call_"), "call_id": made["id"]}
    return {**head, **made["function"], "status": "completed"}
