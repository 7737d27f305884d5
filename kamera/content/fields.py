"""JSON of clients: bounded, and read entry by entry, so that none is ignored."""

from __future__ import annotations

import json
from typing import Any, TypeVar, overload

from kamera.errors import InvalidRequest, quote

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
