"""Edit policies: messages in, the messages of the next turn out, with checks of their results."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ParamSpec, Protocol, cast

from kamera.content import Medium, Message, copy_message
from kamera.edits.directive import EDITS, Directive
from kamera.errors import EditPolicyFailed, first_line, quote

Parameters = ParamSpec("Parameters")

PolicyFunction = Callable[[Sequence[Message], int], Sequence[Message]]
"""``policy(messages, turn) -> messages``: a pure function; ``turn`` counts requests from 0."""

Edits = Sequence[Message] | Sequence[Directive] | None
"""What a policy returns: messages, directives on those that it was given, or None for no change."""


class Transforms(Protocol):
    """An object that is a policy by its ``transform``, a pure function as well."""

    def transform(self, messages: Sequence[Message], turn: int, /) -> Edits:
        """The messages of the next turn, or directives that make them, each with its mode."""


EditPolicy = PolicyFunction | Callable[[Sequence[Message], int], Edits] | Transforms
"""What edits a conversation before each turn."""

PLAIN = (str, int, float, bool, type(None))
"""Types of the values in a message that are no media."""


@dataclass(frozen=True)
class PolicyName:
    """A policy written down: its name, and its arguments as JSON (None: they cannot be written).

    A policy of Kamera is made of this again. The name of any other is its attribute ``name``, or that of its
    function or class; the arguments of a dataclass are its fields.
    """

    name: str
    arguments: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        given = None if self.arguments is None else [f"{n}={v!r}" for n, v in self.arguments.items()]
        return f"{self.name}({'…' if given is None else ', '.join(given)})"

    def make(self) -> EditPolicy | None:
        """The policy, if it is Kamera's and its arguments are known. Raises ValueError for wrong ones."""
        factory = _FACTORIES.get(self.name)
        try:
            return None if factory is None or self.arguments is None else factory(**self.arguments)
        except TypeError as error:
            raise ValueError(f"{self} is no policy: {first_line(error)}") from None


_FACTORIES: dict[str, Callable[..., PolicyFunction]] = {}


def written(factory: Callable[Parameters, PolicyFunction]) -> Callable[Parameters, PolicyFunction]:
    """``factory``, whose policies know their `PolicyName`."""
    name, signature = f"policies.{factory.__name__}", inspect.signature(factory)

    @functools.wraps(factory)
    def make(*values: Parameters.args, **named: Parameters.kwargs) -> PolicyFunction:
        policy, arguments = factory(*values, **named), signature.bind(*values, **named)
        arguments.apply_defaults()
        vars(policy)["written"] = PolicyName(name, _as_json(arguments.arguments))
        return policy

    _FACTORIES[name] = make
    return make


def name_of(policy: EditPolicy) -> PolicyName:
    """The policy written down."""
    own = getattr(policy, "written", None)
    if isinstance(own, PolicyName):
        return own
    name = getattr(policy, "name", None) or getattr(policy, "__qualname__", type(policy).__qualname__)
    fields = asdict(policy) if is_dataclass(policy) and not isinstance(policy, type) else None
    return PolicyName(str(name), None if fields is None else _as_json(fields))


def _as_json(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Arguments as JSON gives them back; None for those that it cannot hold."""
    try:
        whole: Mapping[str, Any] = json.loads(json.dumps(dict(arguments), default=sorted, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return whole


def check_policy(policy: EditPolicy | None) -> None:
    """Raise ValueError for what is no policy."""
    if policy is not None and not callable(getattr(policy, "transform", policy)):
        raise ValueError(
            f"edit_policy {quote(policy)} is none: give a function of messages and turn, or an object with "
            "such a transform"
        )


def apply_policy(policy: EditPolicy, messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
    """The messages after a ``policy`` that returns messages. Raises EditPolicyFailed as `ask_policy`."""
    answer, directives = ask_policy(policy, messages, turn)
    if directives:
        name = getattr(policy, "__name__", type(policy).__name__)
        raise EditPolicyFailed(f"edit policy {name} returned directives: only a session takes them")
    return answer


def ask_policy(
    policy: EditPolicy, messages: Sequence[Message], turn: int
) -> tuple[list[dict[str, Any]], list[Directive]]:
    """The messages after ``policy``, or those given with the directives that it has for them.

    The caller's own are not changed. Raises EditPolicyFailed, naming the policy, if it raises, returns
    anything but messages or edits, modifies its arguments, or returns another result for equal arguments.
    """
    name = getattr(policy, "__name__", type(policy).__name__)
    transform: Callable[[Sequence[Message], int], Edits] = getattr(policy, "transform", cast(Any, policy))
    given = [copy_message(m) for m in messages]
    first = _ask(transform, given, turn, name)
    if not same(given, messages):
        raise EditPolicyFailed(f"edit policy {name} modified the messages it was given: return new ones")
    again = _ask(transform, given, turn, name)
    if not same(again[0], first[0]) or again[1] != first[1]:
        raise EditPolicyFailed(
            f"edit policy {name} gives two results for equal arguments (turn {turn}): its result must depend "
            "on its arguments alone"
        )
    return first


def _ask(
    transform: Callable[[Sequence[Message], int], Edits], messages: list[dict[str, Any]], turn: int, name: str
) -> tuple[list[dict[str, Any]], list[Directive]]:
    try:
        answer = transform(messages, turn)
    except Exception as error:
        raise EditPolicyFailed(
            f"edit policy {name} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    given = [dict(message) for message in messages]
    if answer is None:
        return given, []
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise EditPolicyFailed(
            f"edit policy {name} returned {type(answer).__name__}: return a list of messages"
        )
    directives = [item for item in answer if isinstance(item, Directive)]
    if directives and len(directives) == len(answer):
        if other := [d.verb for d in directives if d.verb not in EDITS]:
            raise EditPolicyFailed(f"edit policy {name} returned the verb {other[0]}: a policy edits")
        return given, directives
    for message in answer:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EditPolicyFailed(
                f"edit policy {name} returned {quote(message)}: a message is a dict with a role"
            )
    if not answer:
        raise EditPolicyFailed(
            f"edit policy {name} left no message: keep at least one (None stands for no change)"
        )
    return [dict(message) for message in cast(Sequence[Message], answer)], []


def same(one: Any, other: Any) -> bool:
    """Equality of messages or their parts; arrays, which have no truth value, are compared by identity."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return False
        for name, value in one.items():  # texts, which most are, without a call
            there = other[name]
            if (value != there) if type(value) is str is type(there) else not same(value, there):
                return False
        return True
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, PLAIN) and isinstance(other, PLAIN):
        return one == other
    owned = isinstance(one, Medium | bytes) and isinstance(other, Medium | bytes)
    return one is other or (owned and one == other)
