"""Messages and tools in the forms of OpenAI's chat and responses and of Anthropic, as templates take them.

JSON of clients is bounded, and read entry by entry, so that none is ignored.
"""

from __future__ import annotations

import base64
import io
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

from PIL import Image

from kamera.content.conversation import Conversations
from kamera.errors import InvalidRequest, first_line, quote

MOST_DEPTH = 48
"""Levels of objects and lists, at most."""

Kind = TypeVar("Kind")

_WANTED = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def json_object(data: bytes) -> dict[str, Any]:
    """The object of a body. Raises InvalidRequest for anything else, and text that no tokenizer takes."""
    try:
        body = json.loads(data, parse_constant=_no_number)
        if not isinstance(body, dict):
            raise InvalidRequest(f"the body is {quote(body)}: send an object")
        level: list[Any] = [body]
        for _ in range(MOST_DEPTH):
            lower: list[Any] = []
            for value in level:
                if isinstance(value, dict):
                    lower += [*value.keys(), *value.values()]
                elif isinstance(value, list):
                    lower += value
                elif isinstance(value, str) and not value.isascii():
                    value.encode()
            level = lower
    except UnicodeEncodeError:
        raise InvalidRequest("a text of the body has a half of a surrogate pair: send whole ones") from None
    except RecursionError:
        level = [None]
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"the body is no JSON: {str(error)[:120]}") from None
    if level:
        raise InvalidRequest(f"the body nests deeper than {MOST_DEPTH} levels: send a flatter one")
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


class Fields:
    """An object of a client. Each entry is read once, by name; `finish` refuses what is left.

    An entry that is null counts as absent. ``at`` is the object's place in the body. Errors are
    InvalidRequest, with the entry's place.
    """

    def __init__(self, value: Any, at: str = "") -> None:
        if not isinstance(value, dict):
            raise InvalidRequest(f"{at} is {quote(value)}: give an object", at)
        self._entries = {name: entry for name, entry in value.items() if entry is not None}
        self._at = at

    def place(self, name: str) -> str:
        """An entry's place in the body."""
        return f"{self._at}.{name}" if self._at else name

    def get(self, name: str, default: Any) -> Any:
        """An entry as it was sent, which stays to be read; the default if it is absent."""
        return self._entries.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @overload
    def take(self, name: str, kind: type[Kind], default: Kind) -> Kind: ...
    @overload
    def take(self, name: str, kind: type[Kind]) -> Kind | None: ...
    def take(self, name: str, kind: type[Kind], default: Kind | None = None) -> Kind | None:
        """An entry of a kind; the default if it is absent."""
        value = self._entries.pop(name, None)
        if value is None:
            return default
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, value, _WANTED[kind])
        return value

    def need(self, name: str, kind: type[Kind]) -> Kind:
        """As `take`, of an entry that may not be absent."""
        if name not in self._entries:
            raise InvalidRequest(f"{self.place(name)} is missing: give {_WANTED[kind]}", self.place(name))
        value = self.take(name, kind)
        assert value is not None, "it is there"
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within ``low`` and ``high``."""
        value = self.take(name, float)
        if value is not None and not low <= value <= high:  # NaN is not
            raise self.wrong(name, value, f"{low:g} to {high:g}")
        return value

    def count(self, name: str, low: int = 1, high: int = 2**31) -> int | None:
        """A whole number within ``low`` and ``high``."""
        value = self.take(name, int)
        if value is not None and not low <= value <= high:
            raise self.wrong(name, value, f"{low} to {high}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text or a list of them, none empty."""
        value = self._entries.pop(name, [])
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list)
            or len(texts) > most
            or not all(isinstance(t, str) and t for t in texts)
        ):
            raise self.wrong(name, value, f"up to {most} texts, none empty")
        return tuple(texts)

    def text(self, name: str) -> str | None:
        """An entry if it is a text; another stays to be read."""
        return self.take(name, str) if isinstance(self._entries.get(name), str) else None

    def take_object(self, name: str, *, absent: bool = False) -> Fields:
        """An entry that is an object; with ``absent`` an empty one stands for none."""
        return Fields(self._entries.pop(name, {} if absent else None), self.place(name))

    def objects(self, name: str, *, needed: bool = False) -> list[Fields]:
        """An entry that is a list of objects; if it is absent, and not ``needed``, an empty one."""
        entries: list[Any] = self.need(name, list) if needed else self.take(name, list, [])
        return [Fields(one, f"{self.place(name)}[{i}]") for i, one in enumerate(entries)]

    def accept_only(self, **allowed: Any) -> None:
        """Take entries that may be absent or say what is done anyway: one value, or one of a tuple."""
        for name, values in allowed.items():
            value = self._entries.pop(name, None)
            choices = values if isinstance(values, tuple) else (values,)
            if value is not None and not any(isinstance(value, type(k)) and value == k for k in choices):
                raise self.wrong(name, value, f"{' or '.join(map(json.dumps, choices))}, or leave it out")

    def wrong(self, name: str, value: Any, wanted: str) -> InvalidRequest:
        """The refusal of an entry."""
        return InvalidRequest(f"{self.place(name)} is {quote(value)}: give {wanted}", self.place(name))

    def finish(self) -> None:
        """Refuse an entry that was not read: it is not supported."""
        for name in self._entries:
            place = self.place(name)[:200]
            raise InvalidRequest(f"{quote(place)} is not supported: leave it out", place)


MOST_PIXELS = 40_000_000
"""Pixels of a picture, at most."""

MOST_LIKELY = 20
"""Likeliest tokens that are told for one place, at most."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of pictures."""

REASONING = "reasoning_content"
"""An answer's thought in its message, where a template has a place for it."""

Messages = list[dict[str, Any]]

_CHAT = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_BROKEN = "�"
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"  # there is none
_LEAST = -9999.0  # of a token that cannot come, as OpenAI writes it: JSON has no infinity
_TEXTS = ("text", "input_text", "output_text")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def chat_message(message: Fields) -> dict[str, Any]:
    """A message of OpenAI's chat. Raises InvalidRequest, as all here."""
    role = message.need("role", str)
    if role not in _CHAT:
        raise message.wrong("role", role, f"one of {', '.join(_CHAT)}")
    out: dict[str, Any] = {"role": _CHAT[role], "content": ""}
    calls = message.objects("tool_calls") if role == "assistant" else []
    if "content" in message or role != "assistant":
        out["content"] = content_of(message, pictures=role in ("user", "tool"))
    if name := message.take("name", str):
        out["name"] = name
    if role == "tool":
        out["tool_call_id"] = message.need("tool_call_id", str)
    for one in calls:
        one.accept_only(type="function")
        function = one.take_object("function")
        out.setdefault("tool_calls", []).append(_call(function, "arguments", one.need("id", str)))
        function.finish()
        one.finish()
    if role == "assistant":
        thought = message.take("reasoning_content", str), message.take("reasoning", str)
        out |= reasoning_of(thought[0] or thought[1])
        message.take("annotations", list)
        message.accept_only(refusal="")
    message.finish()
    return out


def reasoning_of(thought: str | None) -> dict[str, str]:
    """What an answer's message has of the thought before it, as templates name it."""
    return {REASONING: thought} if thought else {}


def response_items(items: list[Fields]) -> Messages:
    """The messages of input items of OpenAI's responses; calls join the answer that they came with."""
    messages: Messages = []
    thought = ""  # of the answer that comes next
    for item in items:
        kind = item.take("type", str, "message")
        item.accept_only(status=("completed", "incomplete", "in_progress"))
        item.take("phase", str)
        if kind == "message":
            role = item.need("role", str)
            if role not in _CHAT or role == "tool":
                raise item.wrong("role", role, "user, assistant, system or developer")
            content = content_of(item, pictures=role == "user", joined=True)
            messages.append({"role": _CHAT[role], "content": content})
        elif kind == "reasoning":
            parts = [*item.objects("summary"), *item.objects("content")]
            thought = "\n".join(map(_thought, parts))
            item.take("encrypted_content", str)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(_call(item, "arguments", item.need("call_id", str)))
        elif kind == "function_call_output":
            content = content_of(item, "output", pictures=True, joined=True)
            messages.append({"role": "tool", "tool_call_id": item.need("call_id", str), "content": content})
        else:
            raise item.wrong("type", kind, "message, reasoning, function_call or function_call_output")
        if messages and messages[-1]["role"] == "assistant" and kind != "reasoning":
            messages[-1] |= reasoning_of(thought)
            thought = ""
        item.take("id", str)
        item.finish()
    return messages


def anthropic_messages(message: Fields) -> Messages:
    """A message of Anthropic's: results of tools are messages of their own, before the rest."""
    role = message.need("role", str)
    if role not in ("user", "assistant"):
        raise message.wrong("role", role, "user or assistant")
    text = message.text("content")
    blocks = [] if text is not None else message.objects("content", needed=True)
    message.finish()
    items: list[dict[str, Any]] = [] if text is None else [{"type": "text", "text": text}]
    calls: list[dict[str, Any]] = []
    results: Messages = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.need("type", str)
        if kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts.append(block.take("thinking", str, ""))
            for name in ("signature", "data"):
                block.take(name, str)
            block.finish()
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, "input", block.need("id", str)))
            _end(block)
        elif kind == "tool_result" and role == "user":
            results.append(_result(block))
        else:
            items.append(_part(block, kind, role == "user"))
    if role == "assistant":
        others = reasoning_of("\n".join(thoughts)) | ({"tool_calls": calls} if calls else {})
        return [{"role": role, "content": _join(items), **others}]
    return [*results, *([{"role": role, "content": _join(items)}] if items or not results else [])]


def content_of(
    message: Fields, name: str = "content", *, pictures: bool, joined: bool = False
) -> str | list[dict[str, Any]]:
    """A message's content, in the form that it has: a text, or a list of parts, ``pictures`` among them.

    Of an API that writes each text in parts, texts alone are ``joined``.
    """
    text = message.text(name)
    if text is not None:
        return text
    parts = message.objects(name, needed=True)
    items = [_part(part, part.need("type", str), pictures) for part in parts]
    return _join(items) if joined or not items else items


def chat_tool(tool: Fields) -> dict[str, Any]:
    """A function that the model may call, in the form of OpenAI's chat."""
    tool.accept_only(type="function")
    out = tool_of(tool.take_object("function"), "parameters")
    tool.finish()
    return out


def tool_of(function: Fields, parameters: str) -> dict[str, Any]:
    """A function that the model may call; ``parameters`` names its schema's entry."""
    name = function.need("name", str)
    if not _NAME.fullmatch(name):
        raise function.wrong("name", name, "letters, digits, _ and -")
    description, schema = function.take("description", str), function.take(parameters, dict)
    strict = function.take("strict", bool) or None
    if strict:
        _check_schema(schema or {}, function.place(parameters))
    function.accept_only(type=("function", "custom"))
    _end(function)
    entries = {"name": name, "description": description, "parameters": schema, "strict": strict}
    return {"type": "function", "function": {k: v for k, v in entries.items() if v is not None}}


Format = tuple[dict[str, Any], str]
"""The JSON schema of an answer, and where it stands in its request."""


def choose_tools(body: Fields, tools: list[dict[str, Any]], wrapped: bool) -> dict[str, Any]:
    """The ``tools`` of a request of OpenAI's, none under ``tool_choice`` "none", and what is said of calls.

    ``forced`` are the names of those of which one has to be called; a ``single`` answer has no second call.
    Chat has the name of a tool that has to be called ``wrapped`` in an object.
    """
    single = not body.take("parallel_tool_calls", bool, True)
    kind, name = body.text("tool_choice"), None
    if kind is None and "tool_choice" in body:
        choice = body.take_object("tool_choice")
        kind = choice.need("type", str)
        holder = choice.take_object("function") if wrapped else choice
        name = holder.need("name", str)
        holder.finish()
        choice.finish()
    kinds = ("auto", "none", "required") if name is None else ("function",)
    return _choice(kind or "auto", kinds, name, tools, single, body.place("tool_choice"))


def hint_of(body: Fields) -> str:
    """What a client of OpenAI's calls a conversation, or its user."""
    names = ("prompt_cache_key", "user", "safety_identifier")
    return "\0".join(body.take(name, str, "") for name in names)


def anthropic_tools(body: Fields) -> dict[str, Any]:
    """As `choose_tools`, of a request of Anthropic's."""
    tools = [tool_of(one, "input_schema") for one in body.objects("tools")]
    choice = body.take_object("tool_choice", absent=True)
    kind = choice.take("type", str, "auto")
    name = choice.need("name", str) if kind == "tool" else None
    single = choice.take("disable_parallel_tool_use", bool, False)
    choice.finish()
    return _choice(kind, ("auto", "none", "any", "tool"), name, tools, single, choice.place("type"))


def chat_format(body: Fields) -> Format | None:
    """What OpenAI's chat says of the answer's form."""
    return _format(body.take_object("response_format", absent=True), "json_schema")


def response_format(body: Fields) -> Format | None:
    """As `chat_format`, of responses, whose ``text`` has it."""
    text = body.take_object("text", absent=True)
    text.accept_only(verbosity="medium")
    made = _format(text.take_object("format", absent=True))
    text.finish()
    return made


def anthropic_format(body: Fields) -> Format | None:
    """As `chat_format`, of Anthropic's messages."""
    holder = body.take_object("output_config", absent=True)
    made = _format(holder.take_object("format", absent=True))
    holder.finish()
    return made


def chat_logprobs(body: Fields) -> int | None:
    """Likeliest tokens that OpenAI's chat asks for at each place; None if it wants no logprobs."""
    has_logprobs, most = body.take("logprobs", bool, False), body.count("top_logprobs", 0, MOST_LIKELY)
    if most and not has_logprobs:
        raise body.wrong("top_logprobs", most, "logprobs: true beside it, or leave it out")
    return (most or 0) if has_logprobs else None


def response_logprobs(body: Fields) -> int | None:
    """As `chat_logprobs`, of responses, which ask by ``include``, too."""
    most, include = body.count("top_logprobs", 0, MOST_LIKELY), body.texts("include", 2)
    if not {_LOGPROBS, _ENCRYPTED}.issuperset(include):
        raise body.wrong("include", [*include], f'["{_LOGPROBS}"], or leave it out')
    return (most or 0) if most or _LOGPROBS in include else None


def fits(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> bool:
    """True unless a call's arguments are no object, or do not fit the schema of a tool that is ``strict``."""
    from jsonschema import Draft202012Validator

    functions = [tool["function"] for tool in tools if tool["function"]["name"] == call["function"]["name"]]
    schemas = [function.get("parameters", {}) for function in functions if function.get("strict")]
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    verdicts = (Draft202012Validator(schema).is_valid(arguments) for schema in schemas)
    return isinstance(arguments, dict) and all(verdicts)


def logprob_items(
    noted: Sequence[tuple[int, float, Sequence[tuple[int, float]]]], text: str, conversations: Conversations
) -> list[dict[str, Any]]:
    """OpenAI's entries of an answer's tokens, as far as they make ``text``.

    Each of ``noted`` is a token's id, its logarithm, and ids and logarithms of the likeliest at its place. A
    token that is no whole character has no ``bytes``.
    """
    ids = [token for token, *_ in noted]

    def characters(count: int) -> int:
        return len(conversations.decode(ids[:count]).rstrip(_BROKEN))

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = conversations.decode([token])
        data = None if _BROKEN in piece else list(piece.encode())
        return {"token": piece, "logprob": max(logprob, _LEAST), "bytes": data}

    count = bisect_left(range(len(ids)), len(text), key=characters)
    return [
        {**entry(token, logprob), "top_logprobs": [entry(*one) for one in others]}
        for token, logprob, others in noted[:count]
    ]


def _choice(
    kind: str, kinds: Sequence[str], name: str | None, tools: list[dict[str, Any]], single: bool, at: str
) -> dict[str, Any]:
    """What `choose_tools` tells; the tool of a ``name`` has to be there."""
    known = [tool["function"]["name"] for tool in tools]
    if kind not in kinds:
        raise InvalidRequest(f"{at} is {quote(kind)}: give one of {', '.join(kinds)}", at)
    if kind == "none":
        return {}
    if kind == "auto":
        return {"tools": tuple(tools), "single": single}
    if not tools or name not in (None, *known):
        what = "names no tool" if name is None else f"names {quote(name)}, which is no tool"
        raise InvalidRequest(f"{at} {what} of this request: give it in tools", at)
    forced = tuple(known) if name is None else (name,)
    return {"tools": tuple(tools), "forced": forced, "single": single or name is not None}


def _format(holder: Fields, wrapped: str = "") -> Format | None:
    """The schema that an object names; ``wrapped`` is the entry in which it, and its name, stand."""
    kind = holder.take("type", str, "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise holder.wrong("type", kind, "text, json_object or json_schema")
    made: Format | None = ({"type": "object"}, holder.place("type")) if kind == "json_object" else None
    if kind == "json_schema":
        inner = holder.take_object(wrapped) if wrapped else holder
        at = inner.place("schema")
        made = inner.need("schema", dict), at
        _check_schema(*made)
        for name, entry in (("name", str), ("description", str), ("strict", bool)):
            inner.take(name, entry)
        inner.finish()
    holder.finish()
    return made


def _check_schema(schema: dict[str, Any], at: str) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        problem = f"{first_line(error)} at {error.json_path}"
        raise InvalidRequest(f"{at} is no JSON schema ({problem}): mend it", at) from None
    if "$ref" in json.dumps(schema).replace('"$ref": "#', ""):
        raise InvalidRequest(f"{at} refers to another schema: give it whole", at)  # nothing is fetched


# -- parts -----------------------------------------------------------------------------------------


def _join(items: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of parts: one text if they are all text."""
    if all(item["type"] == "text" for item in items):
        return "".join(item["text"] for item in items)
    return items


def _part(part: Fields, kind: str, pictures: bool) -> dict[str, Any]:
    if kind in _TEXTS:
        item = {"type": "text", "text": part.take("text", str, "")}
        part.accept_only(annotations=[], logprobs=[], citations=[])
    elif pictures and kind == "image_url":
        item = _from_url(part.take_object("image_url"), "url")
    elif pictures and kind == "input_image":
        item = _from_url(part, "image_url")
    elif pictures and kind == "image":
        source = part.take_object("source")
        source.accept_only(type="base64", media_type=tuple(f"image/{name.lower()}" for name in FORMATS))
        item = _picture(source.need("data", str), source.place("data"))
        source.finish()
    else:
        raise part.wrong("type", kind, "a text, or a picture in a message of the user or of a tool")
    _end(part)
    return item


def _thought(part: Fields) -> str:
    """A part of OpenAI's reasoning item."""
    part.accept_only(type=("summary_text", "reasoning_text"))
    text = part.take("text", str, "")
    part.finish()
    return text


def _end(part: Fields) -> None:
    """End a part; it may say that it be cached, as all is."""
    mark = part.take_object("cache_control", absent=True)
    mark.accept_only(type="ephemeral", ttl=("5m", "1h"))
    mark.finish()
    part.finish()


def _from_url(holder: Fields, name: str) -> dict[str, Any]:
    url, at = holder.need(name, str), holder.place(name)
    holder.accept_only(detail=("auto", "low", "high"))
    holder.finish()
    head, comma, body = url.partition(",")
    if head[:5].lower() != "data:" or not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest(f"{at} is {quote(url)}: nothing is fetched, give a data: url in base64", at)
    return _picture(body, at)


def _picture(text: str, at: str) -> dict[str, Any]:
    """The item of a picture's bytes; its size is known before it is decoded."""
    try:
        data = base64.b64decode(text, validate=True)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Image.DecompressionBombError:
        pixels = MOST_PIXELS + 1
    except (OSError, ValueError, SyntaxError, EOFError, KeyError, TypeError):
        raise InvalidRequest(f"{at} is no picture in base64: give {', '.join(FORMATS)}", at) from None
    if pixels > MOST_PIXELS:
        raise InvalidRequest(f"{at} has more than {MOST_PIXELS} pixels: give a smaller picture", at)
    return {"type": "image", "image": data}


def _call(holder: Fields, name: str, call_id: str) -> dict[str, Any]:
    """A call in a history; its arguments are an object, or the JSON of one in a text."""
    text, at = holder.text(name), holder.place(name)
    try:
        arguments = holder.take(name, dict, {}) if text is None else json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at} is {quote(text)}: give a JSON object", at)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": holder.need("name", str), "arguments": arguments},
    }


def _result(block: Fields) -> dict[str, Any]:
    """A tool's result; templates have no place for a failure, so its text says so."""
    content = content_of(block, pictures=True, joined=True) if "content" in block else ""
    if block.take("is_error", bool, False):
        notice = {"type": "text", "text": "Error: "}
        content = f"Error: {content}" if isinstance(content, str) else [notice, *content]
    out = {"role": "tool", "tool_call_id": block.need("tool_use_id", str), "content": content}
    _end(block)
    return out
