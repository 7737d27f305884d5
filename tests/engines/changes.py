"""Changes of a live model, by name: each makes its KV another, and each is undone by pytest's monkeypatch.

A change takes the model, a fresh one of `FAMILY`, and ``undo``; it returns a function that makes the change:
what it changes may stand in the model before its Backbone is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as library

FAMILY = "qwen2_5_vl"

Undo = pytest.MonkeyPatch
Act = Callable[[], Any]


def _layer(model: Any) -> Any:
    return model.model.language_model.layers[0]


def _far(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a weight that no sample of eight elements along its diagonal touches."""
    count = min(8, max(weight.shape))
    step = sum((n // count) * s for n, s in zip(weight.shape, weight.stride(), strict=True))
    rows = {i * step // weight.stride(0) for i in range(count)}
    return torch.tensor([row for row in range(weight.shape[0]) if row not in rows])


# -- hooks -----------------------------------------------------------------------------------------


class Steering:
    """A hook that adds a vector to what a layer returns."""

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.vector = torch.linspace(-1, 1, 64)
        self.settings = {"gain": 1.0}
        self.array = np.ones(64, dtype=np.float32)

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        return output + self.strength * self.settings["gain"] * self.vector * torch.from_numpy(self.array)

    def apply(self, module: nn.Module, given: Any, output: Any) -> Any:
        return self(module, given, output)


class Slotted:
    """A hook whose strength is in a slot."""

    __slots__ = ("strength",)

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        return output * self.strength


def _hooked(model: Any, hook: Any) -> Any:
    _layer(model).mlp.register_forward_hook(hook)
    return hook


def hook_attribute(model: Any, undo: Undo) -> Act:
    hook = _hooked(model, Steering(1.0))
    return lambda: setattr(hook, "strength", 2.0)


def hook_tensor_in_place(model: Any, undo: Undo) -> Act:
    hook = _hooked(model, Steering(1.0))
    return lambda: hook.vector.mul_(2)


def hook_tensor_through_data(model: Any, undo: Undo) -> Act:
    hook = _hooked(model, Steering(1.0))
    return lambda: hook.vector.data[5:9].mul_(30)


def hook_dict_entry(model: Any, undo: Undo) -> Act:
    hook = _hooked(model, Steering(1.0))
    return lambda: hook.settings.__setitem__("gain", 3.0)


def hook_array(model: Any, undo: Undo) -> Act:
    hook = _hooked(model, Steering(1.0))
    return lambda: hook.array.__setitem__(slice(3, 9), 5.0)


def hook_slot(model: Any, undo: Undo) -> Act:
    hook = _hooked(model, Slotted(1.0))
    return lambda: setattr(hook, "strength", 2.0)


def hook_bound_method(model: Any, undo: Undo) -> Act:
    holder = Steering(1.0)
    _hooked(model, holder.apply)
    return lambda: setattr(holder, "strength", 2.0)


def hook_partial(model: Any, undo: Undo) -> Act:
    holder = Steering(1.0)
    _hooked(model, functools.partial(Steering.apply, holder))
    return lambda: setattr(holder, "strength", 2.0)


def hook_class_method(model: Any, undo: Undo) -> Act:
    _hooked(model, Steering(1.0))
    return lambda: undo.setattr(Steering, "__call__", lambda self, module, given, output: output * 2)


def hook_closure(model: Any, undo: Undo) -> Act:
    strength = 1.0

    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        return output * strength

    def act() -> None:
        nonlocal strength
        strength = 2.0

    _hooked(model, hook)
    return act


STRENGTH = 1.0


def hook_global(model: Any, undo: Undo) -> Act:
    _hooked(model, lambda module, given, output: output * STRENGTH)
    return lambda: undo.setitem(globals(), "STRENGTH", 2.0)


def hook_default(model: Any, undo: Undo) -> Act:
    def hook(module: nn.Module, given: Any, output: Any, strength: float = 1.0) -> Any:
        return output * strength

    _hooked(model, hook)
    return lambda: setattr(hook, "__defaults__", (2.0,))


def hook_module(model: Any, undo: Undo) -> Act:
    probe = nn.Linear(64, 64)
    _hooked(model, lambda module, given, output: output + probe(output))

    def act() -> None:
        with torch.no_grad():
            probe.weight.add_(0.1)

    return act


# -- objects and functions -------------------------------------------------------------------------


class Activation:
    """An activation that is no module."""

    def __init__(self) -> None:
        self.slope = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x * self.slope)


def activation_object(model: Any, undo: Undo) -> Act:
    activation = Activation()
    del _layer(model).mlp.act_fn
    _layer(model).mlp.act_fn = activation
    return lambda: setattr(activation, "slope", 2.0)


def _times(plain: Any) -> Any:
    @functools.wraps(plain)
    def other(*given: Any, **named: Any) -> Any:
        out = plain(*given, **named)
        return (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5

    return other


def class_forward(model: Any, undo: Undo) -> Act:
    return lambda: undo.setattr(library.Qwen2MLP, "forward", _times(library.Qwen2MLP.forward))


def class_forward_of_torch(model: Any, undo: Undo) -> Act:
    return lambda: undo.setattr(nn.Linear, "forward", _times(nn.Linear.forward))


def instance_forward(model: Any, undo: Undo) -> Act:
    mlp = _layer(model).mlp
    return lambda: setattr(mlp, "forward", _times(mlp.forward))


def instance_forwards_closure(model: Any, undo: Undo) -> Act:
    plain, state = _layer(model).mlp.forward, {"gain": 1.0}
    _layer(model).mlp.forward = lambda hidden: plain(hidden) * state["gain"]
    return lambda: state.__setitem__("gain", 2.0)


def function_of_the_file(model: Any, undo: Undo) -> Act:
    return lambda: undo.setattr(library, "rotate_half", _times(library.rotate_half))


def function_behind_a_function(model: Any, undo: Undo) -> Act:
    return lambda: undo.setattr(library, "apply_rotary_pos_emb", _times(library.apply_rotary_pos_emb))


def function_of_torch(model: Any, undo: Undo) -> Act:
    return lambda: undo.setattr(nn.functional, "silu", _times(nn.functional.silu))


def function_behind_a_module_of_torch(model: Any, undo: Undo) -> Act:
    return lambda: undo.setattr(nn.functional, "linear", _times(nn.functional.linear))


def kernel_of_torch(model: Any, undo: Undo) -> Act:
    name = "scaled_dot_product_attention"
    return lambda: undo.setattr(nn.functional, name, _times(nn.functional.scaled_dot_product_attention))


def swapped_code(model: Any, undo: Undo) -> Act:
    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)

    return lambda: undo.setattr(library.rotate_half, "__code__", rotate_half.__code__)


def attention_registered_again(model: Any, undo: Undo) -> Act:
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return lambda: undo.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _times(plain))


def attention_registered_for_all(model: Any, undo: Undo) -> Act:
    plain = sdpa_attention.sdpa_attention_forward
    return lambda: undo.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", _times(plain))


def mask_registered_again(model: Any, undo: Undo) -> Act:
    def mask(*given: Any, **named: Any) -> Any:
        found = plain(*given, **named | {"allow_is_causal_skip": False})
        return found.triu(found.shape[-1] - found.shape[-2] - 3)  # three tokens back and no further

    plain = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return lambda: undo.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", mask)


SEEN_AT_ONCE = [
    hook_attribute,
    hook_tensor_in_place,
    hook_tensor_through_data,
    hook_dict_entry,
    hook_array,
    hook_slot,
    hook_bound_method,
    hook_partial,
    hook_class_method,
    hook_closure,
    hook_global,
    hook_default,
    hook_module,
    activation_object,
    class_forward,
    class_forward_of_torch,
    instance_forward,
    instance_forwards_closure,
    function_of_the_file,
    function_behind_a_function,
    function_of_torch,
    function_behind_a_module_of_torch,
    kernel_of_torch,
    swapped_code,
    attention_registered_again,
    attention_registered_for_all,
    mask_registered_again,
]
"""Changes that the next operation sees."""


# -- what no look sees -----------------------------------------------------------------------------


def written_through_data(model: Any, undo: Undo) -> Act:
    weight = _layer(model).mlp.up_proj.weight
    return lambda: weight.data.index_add_(0, _far(weight), torch.full((len(_far(weight)), 64), 0.3))


def written_through_numpy(model: Any, undo: Undo) -> Act:
    weight = _layer(model).self_attn.v_proj.weight

    def act() -> None:
        weight.detach().numpy()[_far(weight).numpy()] *= 1.5

    return act


def broken_kernel(undo: Undo, name: str) -> Act:
    """Makes a function of torch compute otherwise from now on, and look like the library's own."""
    plain = getattr(nn.functional, name)

    def same(*given: Any, **named: Any) -> torch.Tensor:
        return plain(*given, **named)

    def other(*given: Any, **named: Any) -> torch.Tensor:
        return plain(*given, **named) * 1.5

    undo.setattr(nn.functional, name, of_the_library(same))
    return lambda: undo.setattr(nn.functional, name, of_the_library(other))


def of_the_library(function: Any) -> Any:
    """The function as if its code were in a file of torch."""
    code: CodeType = function.__code__
    function.__code__ = code.replace(co_filename=nn.functional.__file__)
    return function


UNSEEN = [written_through_data, written_through_numpy]
"""Changes that no look sees, and that the probe does."""
