"""What an answer has to be, and the tool calls in it.

Calls are read in the form of the family that a chat template is of. A grammar is JSON of a schema, or calls
of tools in the model's own form. llguidance makes of it, token by token, a mask of the logits; vLLM has its
own means, and is told the same. Of the libraries it is the one that refuses what it cannot bind, where others
bind less than a schema says.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kamera.content import tool_schema
from kamera.engines import Engine
from kamera.errors import InvalidRequest, UnsupportedBackbone, first_line, quote

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


Schema = Mapping[str, Any]
"""A JSON schema."""

_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it: a model that is lost in blanks would never end."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONES = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "propertyNames"),
    *("unevaluatedProperties", "not", "if", "then", "else"),
)
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_TRIED = 400  # parts of a schema, at most, in which the refused one is looked for


@dataclass(frozen=True)
class Grammar:
    """What an answer has to be: JSON that fits ``schema``, a call of ``tools``, or one of both.

    ``tools`` are names of those that the session shows; with ``several`` more calls may follow the first.
    ``at`` is where the schema stands in what a client sent, for refusals.
    """

    schema: Schema | None = None
    tools: tuple[str, ...] = ()
    several: bool = False
    at: str = "schema"


class Bound:
    """A grammar, with the schemas of its tools and the ``form`` in which the model writes calls.

    Raises InvalidRequest for a tool that ``tools`` lack.
    """

    def __init__(self, grammar: Grammar, form: CallForm, tools: Sequence[Any] | None) -> None:
        self._grammar, self._form = grammar, form
        functions = [schema.get("function", schema) for schema in map(tool_schema, tools or ())]
        shown = {function.get("name"): function.get("parameters") for function in functions}
        if unknown := [name for name in grammar.tools if name not in shown]:
            raise InvalidRequest(
                f"no tool {quote(unknown[0])} is given: name one of the tools", "tool_choice"
            )
        self._tools = {name: _arguments(shown[name] or {}) for name in grammar.tools}

    def mask(self, engine: Engine, closing: frozenset[int]) -> Mask:
        """The mask of an answer that may end with a token of ``closing``.

        Raises InvalidRequest for a schema that cannot be compiled, with its place.
        """
        tokenizer = _tokenizer_of(engine, closing)
        matcher = _library().LLMatcher(tokenizer, self._lark())
        if matcher.is_error():
            self._refuse(tokenizer, matcher.get_error())
        return Mask(matcher)

    def for_vllm(self) -> dict[str, Any]:
        """The same as vLLM's ``structured_outputs`` says it."""
        schema, frame = self._grammar.schema, self._form.frame
        if not self._tools:
            return {"json": schema}
        tags = [
            {
                "type": "tag",
                "begin": frame.begin_of(name),
                "content": {
                    "type": "qwen_xml_parameter" if frame.tagged else "json_schema",
                    "json_schema": parameters,
                },
                "end": frame.end,
            }
            for name, parameters in self._tools.items()
        ]
        one = {"type": "or", "elements": tags}
        many = {"type": "tags_with_separator", "tags": tags, "separator": frame.between, "at_least_one": True}
        parts = [_constant(frame.opening), many if self._grammar.several else one, _constant(frame.closing)]
        wanted: dict[str, Any] = {"type": "sequence", "elements": [part for part in parts if part]}
        if schema is not None:
            wanted = {"type": "or", "elements": [wanted, {"type": "json_schema", "json_schema": schema}]}
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": wanted})}

    # -- inside --------------------------------------------------------------------------------

    def _lark(self) -> str:
        """The grammar in llguidance's dialect of Lark."""
        schema, frame, rules, starts = self._grammar.schema, self._form.frame, list[str](), list[str]()
        if schema is not None:
            rules.append(f"json: {_json(schema)}")
            starts.append("json")
        for number, (name, parameters) in enumerate(self._tools.items()):
            begin, end = self._literal(frame.begin_of(name)), self._literal(frame.end)
            rules.append(f"call_{number}: {begin} arguments_{number} {end}")
            rules += (
                _tagged(number, parameters) if frame.tagged else [f"arguments_{number}: {_json(parameters)}"]
            )
        if self._tools:
            rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(self._tools))))
            more = f"({self._literal(frame.between)} call)*" if self._grammar.several else ""
            rules.append(f"calls: {self._literal(frame.opening)} call {more} {self._literal(frame.closing)}")
            starts.append("calls")
        return "\n".join([f"start: {' | '.join(starts)}", *rules])

    def _literal(self, text: str) -> str:
        """A text of the grammar, in which the form's special tokens are tokens."""
        ids = {mark: token for token, mark in self._form.special.items()}
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in ids), text) if ids else [text]
        return " ".join(f"<[{ids[p]}]>" if p in ids else json.dumps(p) for p in parts if p) or '""'

    def _refuse(self, tokenizer: Any, error: str) -> None:
        """Raise InvalidRequest for the schema that cannot be compiled."""
        at = self._grammar.at
        schemas = [(at, at, self._grammar.schema)] if self._grammar.schema is not None else []
        schemas += [("tools", f"the parameters of tool {quote(name)}", s) for name, s in self._tools.items()]
        for place, whose, schema in schemas:
            if problem := _problem(schema, tokenizer):
                inner = _place(schema, tokenizer, problem)
                message = (
                    f"{whose} cannot be bound at {inner}: {_line(problem)}: change that, or leave it out"
                )
                raise InvalidRequest(message, place)
        raise InvalidRequest(f"the answer cannot be bound: {_line(error)}: ask for less", at)


class Mask:
    """Of the logits of one answer those that its grammar allows; it follows the tokens by itself."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._seen: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` ``[1, vocabulary]`` in which what may not come is -inf. Raises ValueError.

        ``input_ids`` ``[1, tokens]`` end with the answer up to now, at the first call with the prompt.
        """
        self.follow(input_ids)
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        self._check()
        allowed = torch.nn.functional.pad(allowed, (0, max(0, scores.shape[-1] - len(allowed))))
        return scores.masked_fill(~allowed[: scores.shape[-1]].to(scores.device), -torch.inf)

    def follow(self, input_ids: torch.Tensor) -> bool:
        """Take the tokens that have come, and tell whether nothing may come any more. Raises ValueError."""
        length = input_ids.shape[1]
        if self._seen is None:
            self._seen = length
        if length > self._seen:
            self._matcher.consume_tokens(input_ids[0, self._seen :].tolist())
            self._seen = length
            self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            error = _line(self._matcher.get_error())
            raise ValueError(f"the answer left its grammar, or that is too much work: {error}: ask for less")


_tokenizers: WeakKeyDictionary[Any, dict[tuple[frozenset[int], int], Any]] = WeakKeyDictionary()
_making = threading.Lock()


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            'answers of a schema and forced calls need llguidance: pip install "kamera-kv[serve]"'
        ) from None
    return llguidance


def _tokenizer_of(engine: Engine, closing: frozenset[int]) -> Any:
    """llguidance's tokenizer of an engine, made once: a second for a large vocabulary."""
    tokenizer, library = getattr(engine.processor, "tokenizer", engine.processor), _library()
    key = closing, engine.builder.token_count
    with _making:
        made = _tokenizers.setdefault(tokenizer, {})
        if key not in made:
            try:
                plain = copy.copy(tokenizer.backend_tokenizer)
                plain.no_padding()
                plain.no_truncation()
                text = plain.to_str()
                ends = sorted(closing) or None
                made[key] = library.LLTokenizer(text, n_vocab=max(key[1], len(tokenizer)), eos_token=ends)
            except Exception as error:  # whatever it does not read
                raise UnsupportedBackbone(
                    f"{type(tokenizer).__name__} cannot be bound to a grammar ({first_line(error)}): ask for "
                    "an answer without a schema, and force no call"
                ) from error
        return made[key]


# -- schemas ---------------------------------------------------------------------------------------


def _arguments(parameters: Schema) -> Schema:
    """The schema of a call's arguments: an object, which has what it names alone unless it says so."""
    closed = not parameters.keys() & {"$ref", "anyOf", "oneOf", "allOf", "additionalProperties"}
    return {"type": "object", **parameters, **({"additionalProperties": False} if closed else {})}


def _json(schema: Schema) -> str:
    """The rule of JSON that fits a schema."""
    return f"%json {json.dumps(_told(schema))}"


def _told(schema: Schema) -> dict[str, Any]:
    """A schema as the library is told it."""
    return {**_essential(schema), "x-guidance": _WRITTEN}


def _essential(schema: Any) -> Any:
    """A schema without what binds nothing: formats that are notes, and ``uniqueItems: false``."""
    if not isinstance(schema, dict):
        return schema
    made = copy.copy(schema)
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    for path, part in _parts(schema):
        made = _with(made, path, _essential(part))
    return made


def _parts(schema: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas in a schema, by their ways from it."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in _NAMED and isinstance(value, dict):
            yield from (((name, key), part) for key, part in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from (((name, at), part) for at, part in enumerate(value))
        elif name in _ONES and isinstance(value, dict):
            yield (name,), value


def _with(schema: Any, path: Sequence[str | int], part: Any) -> Any:
    """A copy of a schema with another part in a place."""
    if not path:
        return part
    made: Any = copy.copy(schema)
    made[path[0]] = _with(made[path[0]], path[1:], part)
    return made


def _problem(schema: Schema, tokenizer: Any) -> str:
    """Why a schema cannot be compiled; "" if it can."""
    matcher_of = _library().LLMatcher
    matcher = matcher_of(tokenizer, matcher_of.grammar_from_json_schema(json.dumps(_told(schema))))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _place(schema: Schema, tokenizer: Any, problem: str) -> str:
    """Where the part stands that is refused: without it the refusal is another one, or none."""
    whole, path, tried = schema, tuple[str | int, ...](), 0
    part: Any = schema
    while True:
        for step, inner in _parts(part):
            tried += 1
            if tried > _TRIED:
                break
            if _problem(_with(whole, (*path, *step), True), tokenizer) != problem:
                path, part = (*path, *step), inner
                break
        else:
            break
        if tried > _TRIED:
            break
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _line(error: str) -> str:
    """An error of the library in one line."""
    return " ".join(error.split())[:200]


def _tagged(number: int, parameters: Schema) -> list[str]:
    """The rules of arguments that are written between tags of their names (Qwen3-Coder): texts bare.

    Of a text its enumeration is bound, nothing else of its schema.
    """
    rules, whole, needed = list[str](), list[str](), parameters.get("required", ())
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    for at, (name, schema) in enumerate((parameters.get("properties") or {}).items()):
        rule, begin, end = f"value_{number}_{at}", f"<parameter={name}>\n", "\n</parameter>\n"
        kind = schema.get("type", "string" if not schema.keys() & {"$ref", "anyOf", "enum"} else None)
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if words and all(isinstance(word, str) for word in words):
            rules.append(f"{rule}: ({' | '.join(map(json.dumps, words))}) {json.dumps(end)}")
        elif kind == "string":
            rules.append(f"{rule}[suffix={json.dumps(end)}]: /(?s:.*)/")
        else:
            rules.append(f"{rule}: {_json({**shared, **schema})} {json.dumps(end)}")
        one = f"{json.dumps(begin)} {rule}"
        whole.append(one if name in needed else f"({one})?")
    return [f"arguments_{number}: {' '.join(whole) or json.dumps('')}", *rules]


def _constant(text: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": text} if text else None
