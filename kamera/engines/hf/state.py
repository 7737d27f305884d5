"""Values, objects and functions as text, down to code and what it holds: the same in every process."""

from __future__ import annotations

import copyreg
import enum
import functools
import json
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.utils.generic import GeneralInterface

from kamera.engines.hf.code import (
    code_digest,
    includes_dependencies,
    is_librarys,
    is_transformers,
    name_of,
    names_in,
    references,
)
from kamera.engines.hf.watch import Watch, content_of_cell
from kamera.ops import digest, tensor_digest

_MOST = 50_000
"""Values read of one model; what holds more counts as beyond reading."""

_DEEP = 40

_WITHOUT_NUMBERS = (
    logging.Logger,
    ModuleType,
    weakref.ref,
    RemovableHandle,  # its number is that of the hook in its process
    threading.Event,
    threading.Condition,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    GenericAlias,
    UnionType,
    GeneralInterface,  # the kernels that a config names are said with it
)
"""Types of objects that no number is computed with: they count by name."""

_OF_CLASSES = frozenset(
    {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__slots__"}
    | {"__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl", "__static_attributes__"}
    | {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__firstlineno__"}
)
_CALLED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "get_rope_index"})
"""Methods by which a model is run; others count once a name in code that is reached may mean them."""

_OF_TENSORS = frozenset({"_is_hf_initialized", "_is_param", "_is_buffer", "persistent"})
"""Attributes of tensors that tell of their loading."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


class Reader:
    """Turns what a model computes with into text, and notes in ``watch`` where a change of it would show.

    A value that cannot be read to its end is said by name, with a line in ``unread``: nobody else can tell
    that theirs is equal. ``foreign`` are the names of code that is neither a library's nor transformers'.
    ``paths`` names the modules of the model, ``config`` says a config.
    """

    def __init__(self, paths: Mapping[int, str], config: Callable[[Any], Any]) -> None:
        self.watch = Watch()
        self.unread: list[str] = []
        self.foreign: list[str] = []
        self._paths = paths
        self._config = config
        self._texts: dict[int, Any] = {}
        self._open: dict[int, int] = {}
        self._alive: list[Any] = []
        self._functions: dict[int, FunctionType] = {}
        self._names = set(_CALLED)
        self._classes: dict[type, bool] = {}

    def value(self, value: Any) -> Any:
        """A value as JSON-able text."""
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float | complex | bytes | torch.dtype | torch.Size):
            return repr(value)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, enum.Enum):
            return f"{name_of(type(value))}.{value.name}"
        if isinstance(value, np.generic):
            return repr(value.item())
        if id(value) in self._texts:
            return self._texts[id(value)]
        if id(value) in self._open:
            return {"around": len(self._open) - self._open[id(value)]}
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and not isinstance(value, type):
            return self._config(value)
        if isinstance(value, nn.Module) and id(value) in self._paths:
            return {"module": self._paths[id(value)]}
        if isinstance(value, tuple):  # may be made anew at every look, so it is not remembered
            return [self.value(v) for v in value]
        return self._visit(value)

    def code_of_seen(self) -> Iterator[list[Any]]:
        """What the functions met read of their modules, and the code of the classes met.

        Of a class what counts is what code that was met may use: what bears a name in it.
        """
        read_attributes: set[tuple[type, str]] = set()
        while True:
            functions, self._functions = self._functions, {}
            for function in functions.values():
                yield [name_of(function), code_digest(function.__code__), *self._globals(function)]
            new_attributes = [
                (cls, name)
                for cls in list(self._classes)
                for name in sorted(vars(cls))
                if (cls, name) not in read_attributes and self._counts(cls, name)
            ]
            if not (new_attributes or self._functions):
                return
            read_attributes.update(new_attributes)
            for cls, name in new_attributes:
                text = self._attribute(vars(cls)[name])
                if text is not None:
                    yield [name_of(cls), name, text]

    def of_class(self, cls: type) -> str:
        """The name of a class, whose code is then said by `classes`."""
        for base in cls.__mro__[:-1]:
            if base not in self._classes and (not is_librarys(base) or issubclass(base, nn.Module)):
                whole = not issubclass(base, nn.Module) and not base.__module__.startswith("transformers.")
                if not (is_librarys(base) or base.__module__.startswith("transformers.")):
                    self.foreign.append(name_of(base))
                self._classes[base] = whole
                self.watch.watch_space(vars(base))
        return name_of(cls)

    def departures(self, function: Any, is_own: Callable[[FunctionType], bool]) -> Any:
        """What a function is and reads, other than ``is_own`` and libraries' own; None for nothing."""
        if not isinstance(function, FunctionType):
            return None if function is None else self.value(function)
        self.watch.watch_function(function)
        if not is_own(function):
            return self.value(function)
        texts = []
        for space, name in references(function):
            self.watch.watch_name(space, name)
            value = space[name]
            if isinstance(value, FunctionType):
                self.watch.watch_function(value)
                if not (is_librarys(value) or is_own(value)):
                    texts.append([name, self.value(value)])
        return texts or None

    # -- inside --------------------------------------------------------------------------------

    def _visit(self, value: Any) -> Any:
        self._alive.append(value)
        if len(self._alive) > _MOST or len(self._open) > _DEEP:
            return self._unread(value, "too much hangs on it")
        self._open[id(value)] = len(self._open)
        try:
            text = self._text(value)
        except Exception as error:  # of any kind: what it is read by may be anybody's code
            text = self._unread(value, f"{type(error).__name__}: {error}"[:200])
        finally:
            del self._open[id(value)]
        # by content, not by number: two modules that share an object are as two with equal ones
        self._texts[id(value)] = (
            text if isinstance(text, str) else digest("kamera.state.v1", json.dumps(text))
        )
        return self._texts[id(value)]

    def _text(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, dict | MappingProxyType):
            return self._mapping(value)
        if isinstance(value, list | deque | set | frozenset):
            self.watch.watch_group(value)
            texts = [self.value(v) for v in value]
            return texts if isinstance(value, list | deque) else {"set": sorted(map(str, texts))}
        if isinstance(value, functools.partial):
            return [self.value(value.func), self.value(value.args), self.value(value.keywords)]
        if isinstance(value, MethodType):
            return [self.value(value.__func__), self.value(value.__self__)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return name_of(value) if is_librarys(value) else self.of_class(value)
        if isinstance(value, BuiltinFunctionType):
            holder = getattr(value, "__self__", None)
            is_bound = holder is not None and not isinstance(holder, ModuleType | type)
            return [name_of(value), self.value(holder)] if is_bound else name_of(value)
        if isinstance(value, _WITHOUT_NUMBERS) or type(value).__module__ == "typing":
            return name_of(value)
        if isinstance(value, functools._lru_cache_wrapper):
            return self.value(value.__wrapped__)
        return self._object(value)

    def tensor(self, tensor: torch.Tensor) -> Any:
        """Digest of a tensor's content, its attributes included; of a packed one, that of its parts."""
        self.watch.tensors[id(tensor)] = tensor
        if tensor.is_meta:
            return "meta"
        attributes = self.attributes(tensor)
        return [tensor_content(tensor), attributes] if attributes else tensor_content(tensor)

    def attributes(self, tensor: torch.Tensor) -> Any:
        """What a tensor carries beside its content, such as the state of a quantiser; None for nothing."""
        attributes = getattr(tensor, "__dict__", {})
        if not attributes or hasattr(tensor, "__tensor_flatten__"):
            return None
        self.watch.watch_space(attributes, _OF_TENSORS)
        texts = [[n, self.value(v)] for n, v in sorted(attributes.items()) if n not in _OF_TENSORS]
        return texts or None

    def _array(self, array: np.ndarray) -> Any:
        if array.dtype.hasobject:
            return [self.value(v) for v in array.flat]
        self.watch.watch_array(array)
        return digest("kamera.array.v1", str(array.dtype), str(array.shape), array.tobytes())

    def _mapping(self, mapping: Mapping[Any, Any]) -> Any:
        self.watch.watch_space(mapping)
        items = dict.items(mapping) if isinstance(mapping, dict) else mapping.items()
        pairs = [[str(k), self.value(v)] for k, v in items]
        return {"dict": sorted(pairs, key=itemgetter(0))}

    def _function(self, function: FunctionType) -> Any:
        self.watch.watch_function(function)
        cells = [content_of_cell(c) for c in function.__closure__ or ()]
        if is_librarys(function):
            closure = [self.value(c) for c in cells if isinstance(c, FunctionType | MethodType | nn.Module)]
            return [name_of(function), *closure] if closure else name_of(function)
        if not is_transformers(function):
            self.foreign.append(name_of(function))
        if includes_dependencies(str(function.__globals__.get("__name__", ""))):
            self._functions[id(function)] = function
            self._names |= names_in(function.__code__)
        defaults = [self.value(function.__defaults__), self.value(function.__kwdefaults__)]
        return [name_of(function), code_digest(function.__code__), *defaults, *map(self.value, cells)]

    def _globals(self, function: FunctionType) -> list[Any]:
        texts = []
        for space, name in references(function):
            value = space[name]
            self.watch.watch_name(space, name)
            if isinstance(value, FunctionType):
                self.watch.watch_function(value)
            if not self._is_given(value):
                texts.append([name, self.value(value)])
        return texts

    def _is_given(self, value: Any) -> bool:
        """True for a global that is the same wherever the same versions of the libraries are installed."""
        if isinstance(value, (*_PLAIN, tuple, list, dict, set, frozenset, torch.Tensor, np.ndarray)):
            return False
        if isinstance(value, FunctionType | MethodType | functools.partial | functools._lru_cache_wrapper):
            return isinstance(value, FunctionType) and is_librarys(value)
        if isinstance(value, ModuleType | BuiltinFunctionType) or is_librarys(value):
            return True
        kind = value if isinstance(value, type) else type(value)
        return not includes_dependencies(str(kind.__module__))

    def _object(self, value: Any) -> Any:
        kind = type(value)
        self.of_class(kind)
        slots = tuple(n for c in kind.__mro__ for n in _slots(c))
        is_native = isinstance(value, torch.ScriptObject) or type(kind).__name__ == "pybind11_type"
        if hasattr(value, "__dict__") and not is_native:
            text = [name_of(kind), self._mapping(vars(value))]
        elif slots:
            text = [name_of(kind), None]
        else:
            text = [name_of(kind), self._inner(value)]
        if slots:
            self.watch.watch_slots(value, slots)
            text.append([[n, self.value(getattr(value, n, None))] for n in slots])
        return text

    def _inner(self, value: Any) -> Any:
        """The state that an object written in another language gives away."""
        if type(value) is object:
            return None
        reduce = copyreg.dispatch_table.get(type(value), lambda item: item.__reduce_ex__(4))
        for ask in (lambda: value.__getstate__(), lambda: reduce(value)[1:]):
            try:
                state = ask()
            except Exception:  # whatever such an object raises, it has not told its state
                continue
            if state is not None:
                return self.value(state)
        raise TypeError("it does not give its state away")

    def _unread(self, value: Any, why: str) -> str:
        self.unread.append(f"a {name_of(type(value))}: {why}")
        return f"{name_of(type(value))}, unread"

    def _counts(self, cls: type, name: str) -> bool:
        if name in _OF_CLASSES:
            return False
        if self._classes[cls]:
            return True
        return name in (self._names if includes_dependencies(cls.__module__) else _CALLED)

    def _attribute(self, attribute: Any) -> Any:
        """The text of an attribute of a class; None for one that is a library's own."""
        if isinstance(attribute, staticmethod | classmethod):
            attribute = attribute.__func__
        if isinstance(attribute, property):
            attribute = [f for f in (attribute.fget, attribute.fset) if f is not None]
        if isinstance(attribute, functools.cached_property):
            attribute = attribute.func
        for function in attribute if isinstance(attribute, list) else [attribute]:
            if isinstance(function, FunctionType):
                self.watch.watch_function(function)
        if isinstance(attribute, FunctionType):
            return self.departures(attribute, is_librarys)
        if isinstance(attribute, list):
            return [self.value(f) for f in attribute if not is_librarys(f)] or None
        return None if self._is_given(attribute) else self.value(attribute)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or those that one packed in a way of its own consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts_of(getattr(tensor, name))


def tensor_content(tensor: torch.Tensor) -> str:
    """`tensor_digest`, also of a tensor that consists of others, is in affine codes, or is not strided."""
    if hasattr(tensor, "__tensor_flatten__"):
        facts = repr(tensor.__tensor_flatten__()[1])
        return digest(
            "kamera.packed.v1", name_of(type(tensor)), facts, *map(tensor_content, parts_of(tensor))
        )
    if tensor.is_quantized:
        axis = tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        scales = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()) if axis else ()
        scheme = (str(tensor.qscheme()), *map(tensor_digest, scales))
        scheme += () if axis else (repr(tensor.q_scale()), repr(tensor.q_zero_point()))
        return digest("kamera.affine.v1", *scheme, tensor_digest(tensor.int_repr()))
    return tensor_digest(tensor if tensor.layout is torch.strided else tensor.to_dense())


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))
