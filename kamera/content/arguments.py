"""Arguments of tool calls: some templates write an object, some a text of JSON, some either."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kamera.errors import ModalityNotSupported

_MARK = "KAMERAMARK"


class Arguments(NamedTuple):
    """Which forms of a call's arguments a template writes as they are."""

    objects: bool
    texts: bool

    @classmethod
    def of(cls, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> Arguments:
        """Those of a template that ``render`` applies to messages."""

        def write(arguments: Any) -> str:
            function = {"name": "f", "arguments": arguments}
            call = {"id": "kamera000", "type": "function", "function": function}
            question = {"role": "user", "content": "x"}
            try:
                return render([question, {"role": "assistant", "content": "", "tool_calls": [call]}])
            except ModalityNotSupported:
                return ""

        as_object, as_text = write({_MARK: 1}), write(json.dumps({_MARK: 1}))
        return cls(_MARK in as_object and f"'{_MARK}'" not in as_object, f'"{_MARK}": 1' in as_text)

    def of_call(self, call: Any) -> Any:
        """A call, its arguments in the other form if the template writes that one alone."""
        function: Any = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and self.objects and not self.texts:
            try:
                return {**call, "function": {**function, "arguments": json.loads(arguments)}}
            except (ValueError, RecursionError):
                return call
        if isinstance(arguments, Mapping) and self.texts and not self.objects:
            return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        return call
