"""A model's computation apart from its tensors, as plain text: classes, settings, functions, foreign hooks.

Two loads of one checkpoint give the same text, in any process and on any machine. An attribute is left out
if it was seen to change no number, or if it is recorded elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from kamera.engines.checkpoint import drop_settings
from kamera.engines.hf.code import is_transformers, name_of
from kamera.engines.hf.hooks import hook_tables, is_foreign
from kamera.engines.hf.state import Reader
from kamera.engines.hf.watch import Watch
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

_OF_CONFIGS = frozenset(_ORIGIN - {"_attn_implementation_internal"})
"""Attributes of a config that no look compares."""

_SAME_ATTENTION = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
"""Kernels of one arithmetic, equal to rounding (K of sdpa and eager: 4e-7 in float32)."""


@dataclass(frozen=True)
class Computation:
    """The text of what a model computes, line by line, what shows a change of it, and what has no text.

    Two models of equal tensors compute the same if their ``lines`` are equal and ``unread`` is empty.
    ``foreign`` names code in it that came with neither torch nor transformers.
    """

    lines: list[list[Any]]
    watch: Watch
    unread: tuple[str, ...]
    foreign: tuple[str, ...]


def computation(model: nn.Module, without: str = "") -> Computation:
    """The `Computation` of a model; ``without`` the modules whose names begin so.

    It has every module's class, settings, forward and foreign hooks, the code they run, and what that holds.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    configs = _Configs()
    reader = Reader({id(module): name for name, module in reversed(modules.items())}, configs.config_number)
    configs.reader = reader
    lines: list[list[Any]] = []
    for name, module in model.named_modules():
        if without and f"{name}.".startswith(without):
            continue
        reader.watch.watch_space(vars(module), skipped_attributes(module))
        settings = _settings(reader, module)
        lines.append([name, reader.of_class(type(module)), *_forward(reader, module), *settings])
        tables = hook_tables([module])[2:]
        lines += [[name, "hooks", *hooks] for hooks in [_foreign(reader, tables)] if hooks]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        attribute_lines = [[name, n, reader.attributes(t)] for n, t in tensors if t is not None]
        lines += [line for line in attribute_lines if line[2] is not None]
    lines.append(["hooks", *_foreign(reader, hook_tables([]))])
    lines += reader.code_of_seen()
    lines.append(["configs", *configs.texts])
    return Computation(lines, reader.watch, tuple(reader.unread), tuple(reader.foreign))


def layers_path(model: nn.Module, decoder: nn.Module) -> str:
    """Prefix of every name in the decoder's layers, the one part that no encoding depends on."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    return f"{path}.layers." if path else "layers."


def skipped_attributes(module: nn.Module) -> frozenset[str]:
    """The attributes of a module that `computation` does not record."""
    if not chooses_frequencies(module):
        return frozenset(_LEFT_OUT)
    return frozenset(_LEFT_OUT | {n for n in vars(module) if n.endswith(_REWRITTEN)})


def chooses_frequencies(module: nn.Module) -> bool:
    """True if a rotary module chooses its ``inv_freq`` anew by the positions of a forward."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)


def binds_buffer(module: nn.Module, name: str) -> bool:
    """True if the fingerprint binds a buffer's present content."""
    is_inv_freq = name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    return not (is_inv_freq and chooses_frequencies(module))


def frequencies(module: nn.Module) -> list[str]:
    """Digests of the frequencies that a module which chooses them returns to at the next short forward.

    "longrope" writes them at every forward from values that are bound already. "dynamic" writes them when
    it has grown; until then the present ones are used.
    """
    if "dynamic" not in str(getattr(module, "rope_type", "")):
        return []
    first = getattr(module, "original_max_seq_len", 0)
    names = [n for n in module._buffers if not binds_buffer(module, n)]
    out = []
    for name in names:
        prefix = name.removesuffix("inv_freq")
        length = getattr(module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", 0))
        if int(length) > first:
            name = f"{prefix}original_inv_freq"
        out.append(tensor_digest(getattr(module, name)))
    return out


def attention(config: Any, reader: Reader) -> Any:
    """The arithmetic of a config's attention: one name for all kernels of the usual one.

    What was registered in place of a library's own kernels, or patched into what they read, is said too.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(config, "_attn_implementation", None)
    usual = name is None or str(name).split("|")[-1] in _SAME_ATTENTION
    texts: list[Any] = ["usual" if usual else str(name)]
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for mapping in (registry._local_mapping, registry._global_mapping):
            reader.watch.watch_space(mapping)
        function = registry.get(str(name))
        texts.append(reader.departures(function, is_transformers) if usual else reader.value(function))
    return texts


class _Configs:
    """Configs as text: each is recorded once and referred to by number from then on."""

    reader: Reader

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self._numbers: dict[int, int] = {}

    def config_number(self, config: Any) -> dict[str, int]:
        """The number of a config."""
        if id(config) not in self._numbers:
            self.reader.watch.watch_space(vars(config), _OF_CONFIGS)
            settings = _text(drop_settings(config.to_dict(), _ORIGIN))
            text = [name_of(type(config)), attention(config, self.reader), settings]
            for value in vars(config).values():  # nested ones are in the text; a change of them shows here
                self._watch(value)
            if text not in self.texts:  # modules that share an object count as modules with equal ones
                self.texts.append(text)
            self._numbers[id(config)] = self.texts.index(text)
        return {"config": self._numbers[id(config)]}

    def _watch(self, value: Any) -> None:
        if isinstance(value, dict):
            self.reader.watch.watch_space(value)
            for inner in value.values():
                self._watch(inner)
        elif isinstance(value, list):
            self.reader.watch.watch_group(value)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            self.reader.watch.watch_space(vars(value), _OF_CONFIGS)
            for inner in vars(value).values():
                self._watch(inner)


def _settings(reader: Reader, module: nn.Module) -> list[Any]:
    """``name=value`` of a module's own attributes, by name."""
    out = skipped_attributes(module)
    pairs = [(n, v) for n, v in sorted(vars(module).items()) if n not in out and n != "forward"]
    return [[n, reader.value(v)] for n, v in pairs]


def _foreign(reader: Reader, tables: list[dict[int, Any]]) -> list[Any]:
    return [reader.value(hook) for table in tables for hook in list(table.values()) if is_foreign(hook)]


def _forward(reader: Reader, module: nn.Module) -> list[Any]:
    """The forward that runs, if it is not the class's."""
    own = vars(module).get("forward")
    if "_hf_hook" in vars(module):  # accelerate's, which only moves tensors
        own = vars(module).get("_old_forward")
    if own is None or getattr(own, "__func__", None) is type(module).forward:
        return []
    return [reader.value(own)]


def _text(value: Any) -> Any:
    """A config's value as JSON-able: plain values as they are, all others by name."""
    if isinstance(value, dict):
        return {k: _text(v) for k, v in sorted([(str(k), v) for k, v in value.items()], key=itemgetter(0))}
    if isinstance(value, list):
        return [_text(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value) if isinstance(value, torch.dtype | torch.device) else name_of(value)
