"""Tool calls in an answer, in the form of the family that a chat template is of."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from kamera.content import tool_schema
from kamera.engines import Engine

Calls = tuple[dict[str, Any], ...]
"""Calls as OpenAI sends them: arguments are JSON in a text. No id comes twice."""


class Found(NamedTuple):
    """A call: where it begins and ends in the text, its name and its arguments."""

    start: int
    stop: int
    name: str
    arguments: Any


@dataclass(frozen=True)
class Frame:
    """What stands around the arguments of a call, and around and between calls, as a model is to write them.

    ``begin`` has NAME where the tool's name comes. ``tagged`` arguments are no JSON object, but each between
    tags of its name.
    """

    begin: str = '<tool_call>\n{"name": "NAME", "arguments": '
    end: str = "}\n</tool_call>"
    between: str = "\n"
    opening: str = ""
    closing: str = ""
    tagged: bool = False

    def begin_of(self, name: str) -> str:
        """What stands before the arguments of a call of a tool."""
        return self.begin.replace("NAME", name)


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls; this one: between ``<tool_call>`` tags, as JSON (Hermes, Qwen).

    ``marks`` are what a call begins with, ``inner`` others that it has. Those that are special tokens, by id,
    are ``special``: they are no part of an answer's text. ``frame`` is how calls that are forced are written.
    A subclass overrides `find`.
    """

    marks: tuple[str, ...] = ("<tool_call>",)
    inner: tuple[str, ...] = ("</tool_call>",)
    special: Mapping[int, str] = field(default_factory=dict)
    frame: Frame = Frame()

    def find(self, text: str, types: Mapping[str, Mapping[str, Any]]) -> Iterator[Found]:
        """The calls of a text, in order; ``types`` are the schemas of tools' parameters, by tool and name."""
        for match in re.finditer(r"\s*<tool_call>(.*?)</tool_call>", text, re.DOTALL):
            for call in _objects(match[1]):
                yield from _of_json(match.start(), match.end(), call)

    def new_id(self) -> str:
        """An id that no other call has."""
        return f"call_{secrets.token_hex(12)}"

    def found(self, text: str, tools: Sequence[Any] | None = None) -> list[Found]:
        """The calls of an answer: in this form, or one fence of JSON that is all of it and names a tool.

        The latter is what models write that were taught calls by other templates than their own.
        """
        types = _types(tools)
        if found := [*self.find(text, types)]:
            return found
        fence = _FENCED_JSON.fullmatch(text)
        return [
            one
            for value in (_objects(fence[1]) if fence else ())
            for one in _of_json(0, len(text), value)
            if one.name in types and isinstance(one.arguments, dict)
        ]

    def parse(self, text: str, tools: Sequence[Any] | None = None) -> tuple[str, Calls]:
        """The text outside of calls, and the calls. What is no whole call stays text."""
        rest, calls, end = "", list[dict[str, Any]](), 0
        for start, stop, name, arguments in self.found(text, tools):
            body = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": name, "arguments": body}
            calls.append({"id": self.new_id(), "type": "function", "function": function})
            rest, end = rest + text[end : max(start, end)], stop
        return self.without_special_tokens(rest + text[end:]), tuple(calls)

    def safe_length(self, text: str) -> int:
        """Characters of an answer's beginning that are part of no call, whatever comes behind them."""
        if _may_be_fenced(text):
            return 0
        end = min((at for mark in self.marks if (at := text.find(mark)) >= 0), default=len(text))
        for mark in self.marks:
            lengths = (n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
            end = min(end, len(text) - next(lengths, 0))
        return len(text[:end].rstrip())

    def decode(self, engine: Engine, ids: Sequence[int]) -> str:
        """The text of an answer's tokens, in which special tokens that belong to calls are written."""
        text, start = "", 0
        for at, token in enumerate([*ids, -1]):
            if token in self.special or at == len(ids):
                part = torch.tensor(ids[start:at], dtype=torch.int64)
                text += (engine.builder.detokenize(part) or "") + self.special.get(token, "")
                start = at + 1
        return text

    def without_special_tokens(self, text: str) -> str:
        """A text without special tokens."""
        for mark in self.special.values():
            text = text.replace(mark, "")
        return text


class _Tagged(CallForm):
    """``<function=name><parameter=key>value</parameter></function>`` (Qwen3-Coder)."""

    def find(self, text: str, types: Mapping[str, Mapping[str, Any]]) -> Iterator[Found]:
        whole = r"\s*(?:<tool_call>\s*)?<function=([^>\s]+)>(.*?)</function>(?:\s*</tool_call>)?"
        one = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
        for match in re.finditer(whole, text, re.DOTALL):
            schemas = types.get(match[1], {})
            arguments = {name: _convert(value, schemas.get(name)) for name, value in one.findall(match[2])}
            yield Found(match.start(), match.end(), match[1], arguments)


class _Bare(CallForm):
    """JSON objects that are the whole answer, with ``;`` between them (Llama 3)."""

    def find(self, text: str, types: Mapping[str, Mapping[str, Any]]) -> Iterator[Found]:
        head, mark, body = text.partition(self.marks[0])
        head, body = (head.rstrip(), body) if mark else ("", text)
        at, calls, rest = 0, [], ""
        while (begin := body.find("{", at)) >= 0:
            call, stop = _decode(body, begin)
            if not isinstance(call, dict) or not call.keys() & {"parameters", "arguments"}:
                return
            calls.append(call)
            rest, at = rest + body[at:begin], stop
        if not (rest + body[at:]).strip("; \n"):  # nothing else is said
            for call in calls:
                yield from _of_json(len(head), len(text), call)

    def safe_length(self, text: str) -> int:
        return 0 if text.lstrip().startswith("{") else super().safe_length(text)


class _Listed(CallForm):
    """Behind ``[TOOL_CALLS]``: a list of objects, or a name and its arguments (Mistral)."""

    def find(self, text: str, types: Mapping[str, Mapping[str, Any]]) -> Iterator[Found]:
        for match in re.finditer(r"\s*\[TOOL_CALLS\]\s*", text):
            name_match = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*").match(text, match.end())
            at = name_match.end() if name_match else match.end()
            value, stop = _decode(text, at)
            if name_match and isinstance(value, dict):
                yield Found(match.start(), stop, name_match[1], value)
            for call in value if isinstance(value, list) and not name_match else ():
                yield from _of_json(match.start(), stop, call)

    def new_id(self) -> str:
        """Nine letters and digits: its templates take no other."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _Fenced(CallForm):
    """Between ``<｜tool▁calls▁begin｜>`` and its end; arguments in a fence, or bare (DeepSeek)."""

    def find(self, text: str, types: Mapping[str, Mapping[str, Any]]) -> Iterator[Found]:
        first, begin = self.marks
        sep, end, last = self.inner
        whole = rf"\s*(?:{first}\s*)?{begin}(.*?){sep}(.*?){end}(?:\s*{last})?"
        for match in re.finditer(whole, text, re.DOTALL):
            fence = re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", match[2], re.DOTALL)
            name, body = fence.groups() if fence else (match[1].strip(), match[2])
            for value in _objects(body):
                yield Found(match.start(), match.end(), name, value)


_FENCED_JSON = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL)
_BEGINS_FENCED = re.compile(r"\s*(?:`{0,2}|```(?:j|js|jso|json)?\s*(?:\{.*)?)", re.DOTALL)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_INSIDE = ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_NO_FENCE = Frame(f"{_DEEPSEEK[1]}NAME{_INSIDE[0]}", _INSIDE[1], "", _DEEPSEEK[0], _INSIDE[2])
_FENCE = replace(
    _NO_FENCE,
    begin=f"{_DEEPSEEK[1]}function{_INSIDE[0]}NAME\n```json\n",
    end=f"\n```{_INSIDE[1]}",
    between="\n",
)
_NAMES = Frame("[TOOL_CALLS]NAME[ARGS]", "", "")
_LIST = Frame('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]")
_TAGS = Frame("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", tagged=True)


def template_of(processor: Any) -> str:
    """The source of a processor's chat template."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return str(getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None))


def call_form(engine: Engine) -> CallForm:
    """The form of calls that an engine's chat template writes; Hermes' for one of no family that is known."""
    template = template_of(engine.processor)
    form: CallForm
    if _DEEPSEEK[0] in template:
        form = _Fenced(_DEEPSEEK, _INSIDE, frame=_FENCE if "```json" in template else _NO_FENCE)
    elif "[TOOL_CALLS]" in template:
        frame = _NAMES if "[ARGS]" in template else _LIST
        form = _Listed(("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), frame=frame)
    elif "<function=" in template:
        form = _Tagged(("<tool_call>", "<function="), frame=_TAGS)
    elif "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        form = _Bare(("<|python_tag|>",), frame=Frame('{"name": "NAME", "parameters": ', "}", "; "))
    else:
        form = CallForm()
    tokenizer = getattr(engine.processor, "tokenizer", engine.processor)
    tokens: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    words = {*form.marks, *form.inner}
    return replace(form, special={i: str(t) for i, t in tokens.items() if t.special and str(t) in words})


# -- values ----------------------------------------------------------------------------------------


def _types(tools: Sequence[Any] | None) -> dict[str, Mapping[str, Any]]:
    """Schemas of parameters, by tool and name."""
    schemas = [tool_schema(tool) for tool in tools or ()]
    functions = [schema.get("function", schema) for schema in schemas]
    return {f.get("name", ""): (f.get("parameters") or {}).get("properties") or {} for f in functions}


def _convert(value: str, schema: Any) -> Any:
    """A value that is written without quotes: a text, unless its schema says otherwise."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string"):
        return value
    word = value.strip()
    if word in ("True", "False", "None"):  # templates write Python's
        return {"True": True, "False": False, "None": None}[word]
    values = [None] if word == "null" else _objects(word)
    return values[0] if values else value


def _of_json(start: int, stop: int, call: Any) -> Iterator[Found]:
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        arguments = call.get("arguments", call.get("parameters"))
        yield Found(start, stop, call["name"], {} if arguments is None else arguments)


def _may_be_fenced(text: str) -> bool:
    """Whether an answer that begins so may become one fence of JSON."""
    if not _BEGINS_FENCED.fullmatch(text):
        return False
    value, stop = _decode(text, max(0, text.find("{")))
    return value is None or "```".startswith(text[stop:].strip())


def _objects(text: str) -> list[Any]:
    """The one value of JSON that a text is; none if it is not."""
    value, stop = _decode(text, len(text) - len(text.lstrip()))
    return [] if text[stop:].strip() or value is None else [value]


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The value of JSON at a place of a text, and where it ends; None if there is none."""
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
