"""A model's computation apart from its tensors, as plain text: classes, settings, functions, foreign hooks.

Two loads of one checkpoint give the same text, in any process and on any machine. An attribute is left out
if it was seen to change no number, or if it is recorded elsewhere.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kamera.engines.hf.hooks import hook_tables, is_foreign
from kamera.ops import tensor_digest

_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module: its tables, which are walked, and the machinery of gradients and loading."""

_LEFT_OUT = _TORCH | {
    # origin, loading, saving, splitting and placement
    "name_or_path",
    "_is_hf_initialized",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
    "_no_split_modules",
    "_skip_keys_device_placement",
    "_tp_plan",
    "_tp_size",
    "_ep_plan",
    "_pp_plan",
    "_fsdp_plan",
    "_device_mesh",
    "_weight_conversions",
    "_use_kernels",  # kernels in use replace forwards, which are recorded
    "all_tied_weights_keys",
    "hf_device_map",
    "_hf_hook",
    "_old_forward",
    # read only by generation, losses and warnings
    "generation_config",
    "loss_type",
    "_loss_function",
    "warnings_issued",
    # left by a forward for the next: positions are always given, frequencies are recorded below
    "rope_deltas",
    "_output_capturing_hooks_installed",
    # recorded once for the whole model, by `attention`
    "_attn_implementation",
}

_REWRITTEN = ("max_seq_len_cached", "long_inv_freq", "attention_scaling", "inv_freq")
"""Attributes rewritten by rotary modules that choose their frequencies at every forward."""

_ORIGIN = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",  # that of the tensors themselves is bound with them
    "torch_dtype",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "_experts_implementation_internal",
    "_commit_hash",
    "_output_attentions",
    "_post_init_done",
}

_SAME_ATTENTION = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
"""Kernels of one arithmetic, equal to rounding (K of sdpa and eager: 4e-7 in float32)."""


def computation(model: nn.Module) -> Iterator[list[Any]]:
    """JSON-able lines that two models of equal tensors share if they compute the same."""
    said = _Said()
    for name, module in model.named_modules():
        yield [name, _class(type(module)), *_forward(module), *said.settings(module)]
        hooks = _foreign(hook_tables([module])[2:])
        if hooks:
            yield [name, "hooks", *hooks]
    yield ["hooks", *_foreign(hook_tables([]))]
    yield ["configs", *said.configs]


def layers_path(model: nn.Module, decoder: nn.Module) -> str:
    """Prefix of every name in the decoder's layers, the one part that no encoding depends on."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    return f"{path}.layers." if path else "layers."


def watched(model: nn.Module) -> tuple[list[tuple[dict[str, Any], frozenset[str]]], list[Any]]:
    """The containers of a model's settings: dicts, each with its names that are left out, and lists."""
    found: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}
    lists: dict[int, Any] = {}
    for module in model.modules():
        _watch(vars(module), left_out(module), found, lists)
    return list(found.values()), list(lists.values())


def left_out(module: nn.Module) -> frozenset[str]:
    """The attributes of a module that `computation` does not record."""
    if not chooses_frequencies(module):
        return frozenset(_LEFT_OUT)
    return frozenset(_LEFT_OUT | {n for n in vars(module) if n.endswith(_REWRITTEN)})


def chooses_frequencies(module: nn.Module) -> bool:
    """True if a rotary module chooses its ``inv_freq`` anew by the positions of a forward."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)


def bound_buffer(module: nn.Module, name: str) -> bool:
    """True if the fingerprint binds a buffer's present content."""
    chosen = name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    return not (chosen and chooses_frequencies(module))


def frequencies(module: nn.Module) -> list[str]:
    """Digests of the frequencies that a module which chooses them returns to at the next short forward.

    "longrope" writes them at every forward from values that are bound already. "dynamic" writes them when
    it has grown; until then the present ones are used.
    """
    if "dynamic" not in str(getattr(module, "rope_type", "")):
        return []
    first = getattr(module, "original_max_seq_len", 0)
    names = [n for n in module._buffers if not bound_buffer(module, n)]
    out = []
    for name in names:
        prefix = name.removesuffix("inv_freq")
        held = getattr(module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", 0))
        if int(held) > first:
            name = f"{prefix}original_inv_freq"
        out.append(tensor_digest(getattr(module, name)))
    return out


def attention(config: Any) -> str:
    """The arithmetic of a config's attention: one name for all kernels of the usual one."""
    name = getattr(config, "_attn_implementation", None)
    if name is None or str(name).split("|")[-1] in _SAME_ATTENTION:
        return "usual"
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return f"{name}:{_name(ALL_ATTENTION_FUNCTIONS.get(str(name)))}"


def autocast(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The autocast this thread runs under, by device type; empty for none."""
    return tuple(
        f"{device}:{torch.get_autocast_dtype(device)}"
        for device in devices
        if torch.is_autocast_enabled(device)
    )


def plain_settings(config: Any) -> Any:
    """A config as JSON-able settings, without its origin."""
    return _without_origin(config.to_dict())


class _Said:
    """Settings as text. Each config is recorded once and referred to by number from then on."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self._numbers: dict[int, int] = {}

    def settings(self, module: nn.Module) -> list[Any]:
        """``name=value`` of a module's own attributes, by name."""
        out = left_out(module)
        return [
            [n, self.value(v)] for n, v in sorted(vars(module).items()) if n not in out and n != "forward"
        ]

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value as JSON-able text that is the same in every process."""
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float | complex | bytes | torch.dtype | torch.Size):
            return repr(value)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, enum.Enum):
            return f"{_class(type(value))}.{value.name}"
        if isinstance(value, torch.Tensor):
            return "meta" if value.is_meta else tensor_digest(value)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            return self._config(value)
        if depth > 4:
            return _class(type(value))
        if isinstance(value, Mapping):
            pairs = [[str(k), self.value(v, depth + 1)] for k, v in value.items()]
            return {"dict": sorted(pairs, key=lambda pair: str(pair[0]))}
        if isinstance(value, list | tuple):
            return [self.value(v, depth + 1) for v in value]
        if isinstance(value, set | frozenset):
            return {"set": sorted(str(self.value(v, depth + 1)) for v in value)}
        if isinstance(value, functools.partial):
            return [
                _name(value.func),
                self.value(value.args, depth + 1),
                self.value(value.keywords, depth + 1),
            ]
        if isinstance(value, nn.Module):
            return _class(type(value))
        return _name(value)

    def _config(self, config: Any) -> dict[str, int]:
        if id(config) not in self._numbers:
            told = [_class(type(config)), attention(config), _text(plain_settings(config))]
            if told not in self.configs:  # modules that share an object count as modules with equal ones
                self.configs.append(told)
            self._numbers[id(config)] = self.configs.index(told)
        return {"config": self._numbers[id(config)]}


def _watch(
    here: Any, out: frozenset[str], found: dict[int, tuple[dict[str, Any], frozenset[str]]], lists: Any
) -> None:
    if id(here) in found:
        return
    found[id(here)] = (here, out)
    for name, value in list(here.items()):
        if name in out:
            continue
        if isinstance(value, dict):
            _watch(value, frozenset(), found, lists)
        elif isinstance(value, list):
            lists[id(value)] = value
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _watch(vars(value), frozenset(_ORIGIN - {"_attn_implementation_internal"}), found, lists)


def _foreign(tables: list[dict[int, Any]]) -> list[str]:
    return [_name(hook) for table in tables for hook in list(table.values()) if is_foreign(hook)]


def _forward(module: nn.Module) -> list[str]:
    """Name of the forward that runs: the module's own, else its class's, which shows a patched class."""
    own = vars(module).get("forward")
    if own is None or "_hf_hook" in vars(module):  # accelerate's, which only moves tensors
        own = vars(module).get("_old_forward") or type(module).forward
    return [_name(own)]


def _class(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _name(value: Any) -> str:
    """A function, method or object by its qualified name, never by its address."""
    if isinstance(value, functools.partial):
        return _name(value.func)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _without_origin(settings: Any) -> Any:
    if isinstance(settings, list | tuple):
        return [_without_origin(s) for s in settings]
    if not isinstance(settings, dict):
        return settings
    return {k: _without_origin(v) for k, v in settings.items() if k not in _ORIGIN}


def _text(value: Any) -> Any:
    """A config's value as JSON-able: plain values as they are, all others by name."""
    if isinstance(value, dict):
        return {str(k): _text(v) for k, v in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list):
        return [_text(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value) if isinstance(value, torch.dtype | torch.device) else _name(value)
