"""The identity of a live model: a fingerprint, made once, and what shows cheaply that it no longer holds.

The fingerprint digests all that decides a chunk's KV apart from its tokens. Before each operation flat lists
tell if a tensor was written or a module, adapter or hook exchanged. Functions that were patched, attributes
of modules and writes that PyTorch does not count are the caller's business (docs/limits.md).
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn

from kamera.content import Chunk, Encoded, exclusive_of
from kamera.engines.checkpoint import drop_settings
from kamera.engines.hf import contents, forwards, probe
from kamera.engines.hf.hooks import Hook, foreign_hooks, hook_tables, unobserved
from kamera.engines.hf.prove import sample_text
from kamera.engines.work import expected_fingerprint
from kamera.errors import IncompatibleChunk, KameraError, ModelChanged, UnsupportedBackbone
from kamera.ops import digest, kv_tensors, tensor_digest

if TYPE_CHECKING:
    from kamera.engines.hf.engine import HfEngine


logger = logging.getLogger(__name__)

_ORIGIN = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
"""Settings of where a config comes from, beside those whose names begin with an underscore. The dtype of the
tensors themselves is bound with them."""

_SAME_ATTENTION = ("None", "eager", "sdpa", "flex_attention")
"""Kernels of one arithmetic, equal to rounding, as all that begin with "flash_attention" are."""

_SIDE = 56  # pixels of the picture that hooks are tried on
_TOKENS = 12  # and of the text
_SAMPLED, _ELEMENTS = 4, 8  # tensors read at every look, elements of each

_version, _address = attrgetter("_version"), torch.Tensor.data_ptr
_values = dict[str, Any].values
_switches = attrgetter("_active_adapter", "_disable_adapters")


class ModelIdentity:
    """The fingerprints of a live model and its processor. Safe to use from several threads.

    ``variant`` is the caller's name of what no digest sees: hooks that steer, patched functions.
    """

    def __init__(self, model: HfEngine, variant: str = "") -> None:
        self._model, self._variant = model, variant
        self._devices = tuple(sorted({p.device.type for p in model.model.parameters()}))
        self._nonce = secrets.token_hex(16)
        self.tolerance = _tolerance(model)
        self._of_files = ("", "")  # the digest of the model as it was loaded, and its files' own
        self._ropes = probe.probe_ropes(model.decoder, len(model.layout))
        self._picture = _picture(model)
        self._outside: list[Hook] = []
        self._trials = ("", "")
        self._make()

    def fingerprint(self) -> str:
        """As `Engine.checked_fingerprint`."""
        self._check_unchanged()
        self._try_hooks()
        if self._outside and self._picture is not None:
            self._try_outside(partial(_encode, self._model, self._picture))
        return self.current()

    def vision(self) -> str:
        """As `Engine.vision_fingerprint`."""
        return self._salted(self._vision)

    def origin(self) -> str:
        """As `Engine.origin`."""
        facts = self._origin | dict(self._salts())
        if any(self._trials):
            facts["hooks"] = f"of process {os.getpid()}"
        if self._is_as_loaded:
            facts["identity"] = "of files"
        return json.dumps(facts)

    def current(self) -> str:
        """As `Engine.fingerprint`, under the autocast of this thread and the model's mode."""
        if any(self._trials):
            self._try_hooks()  # they may have gone
        return self._salted(self._of_files[1] if self._is_as_loaded else self._whole)

    def check(self, fingerprint: str) -> None:
        """As `Engine.check`."""
        self._check_unchanged()
        if self.current() != fingerprint:
            raise IncompatibleChunk(
                f"this is KV of model {fingerprint[:12]}, which is {self.current()[:12]} now (other weights, "
                "adapters, hooks that change what it computes, or autocast): undo that, or make a new "
                "window, session or pool"
            )

    def check_forward(self) -> None:
        """Before a forward: raise IncompatibleChunk if hooks that came or went make it another model.

        Background work also raises as `check`, for the model that it was handed over for.
        """
        if expected := expected_fingerprint():
            self.check(expected)
        before = self._trials
        self._try_hooks()
        self._refuse_other(before)

    def check_chunk(self, chunk: Chunk) -> None:
        """Before an encode: raise IncompatibleChunk for another model's chunk, and as `check_forward`."""
        if chunk.fingerprint != self.current():
            raise IncompatibleChunk(
                f"chunk {chunk.id[:12]} was built by backbone {chunk.fingerprint[:12]}, this is "
                f"{self.current()[:12]}: build it again with this backbone's chunk()"
            )
        self.check_forward()

    def check_encoding(self, encoded: Encoded, encode: Callable[[], Encoded]) -> None:
        """After an encode: try new hooks outside of the decoder on it. Raises as `check_forward`."""
        before = self._trials
        if self._outside and encoded.tensors:
            self._try_outside(encode, encoded)
        self._refuse_other(before)

    def refresh(self) -> None:
        """As `HfEngine.refresh`."""
        with self._model.turns.alone():
            self._make()
            self.fingerprint()

    def vocabulary(self) -> str:
        """As `Identity.vocabulary`."""
        tokenizer = getattr(self._model.processor, "tokenizer", self._model.processor)
        if tokenizer is None:
            return ""
        with exclusive_of(tokenizer):
            words = (f"{index} {token}" for token, index in sorted(tokenizer.get_vocab().items()))
            return digest("kamera.vocabulary.v1", *words)

    def name(self, of_files: str) -> None:
        """Give the model as it is now the fingerprint ``of_files`` that it was loaded from.

        Any change gives it one of its own, and taking that back gives it this one again. A model whose
        attention is a kernel of its own, which no file names, keeps its own.
        """
        if not self._attention:
            self._of_files = (self._whole, of_files)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _is_as_loaded(self) -> bool:
        return self._whole == self._of_files[0]

    def _make(self) -> None:
        model = self._model
        watch = _Watch(model.model)  # first: what is written meanwhile shows
        if probe.probe_ropes(model.decoder, len(model.layout)) != self._ropes:
            raise ModelChanged(
                f"the rotary angles of this {model.facts.kind} are not those that its Backbone read: put "
                "them back, or make a new Backbone"
            )
        layers = _layers_path(model.model, model.decoder)
        weights = _weights_digests(model.model, layers)
        processor = _processor_digest(model.processor)
        self._attention = _attention(model.model.config)
        libraries = {one.__name__: ".".join(one.__version__.split(".")[:2]) for one in (torch, transformers)}
        config = [_settings(model.model.config), self._attention, str(model.dtype)]
        whole = [config, repr(model.layout), repr(model.limits), _modules(model.model)]
        vision = [config, _modules(model.model, layers)]
        self._whole = digest("kamera.backbone.v5", weights[0], processor, _json([whole, libraries]))
        self._vision = digest("kamera.vision.v4", weights[1], processor, _json([vision, libraries]))
        quantisation = getattr(model.model.config, "quantization_config", None)
        self._origin = {
            "class": model.facts.kind,
            "dtype": model.facts.dtype,
            "adapters": ", ".join(sorted({n for one in watch.adapters for n in _active(one)})),
            "quantisation": "" if quantisation is None else str(_settings(quantisation).get("quant_method")),
            **libraries,
            "weights": f"#{weights[0][:12]}",
            "settings": f"#{digest(_json(whole))[:12]}",
            "processor settings": f"#{processor[:12]}",
        }
        self._watch = watch
        self._hook_keys: tuple[int, ...] = ()
        self._foreign: list[int] | None = None  # not tried yet

    def _check_unchanged(self) -> None:
        if self._watch.has_changed():
            raise ModelChanged(
                f"the weights, modules or adapters of this {self._model.facts.kind} have changed since its "
                "fingerprint was made: undo that, or call backbone.refresh() and make a new window"
            )

    def _salts(self) -> list[tuple[str, str]]:
        """What makes this another model than its digests say, by name."""
        on = [d for d in self._devices if torch.is_autocast_enabled(d)]
        salts = [("autocast", f"{d} {torch.get_autocast_dtype(d)}") for d in on]
        if self._model.model.training:
            salts.append(("mode", "training"))
        if self._variant:
            salts.append(("variant", self._variant))
        if any(self._trials):
            salts.append(("hooks", " ".join((str(os.getpid()), self._nonce, *self._trials))))
        return salts

    def _salted(self, fingerprint: str) -> str:
        salts = self._salts()
        return digest("kamera.variant.v1", fingerprint, *chain(*salts)) if salts else fingerprint

    def _try_hooks(self) -> None:
        """Run a small text with foreign hooks and without, if they are others than at the last trial.

        ``_trials`` are "" where both are equal bit for bit, else digests of what the hooks make of it: of a
        text's KV and logits, and of an encoding. A named variant is not tried.
        """
        keys = self._watch.hook_keys()
        if keys == self._hook_keys:
            return
        with self._model.turns.alone():
            hooks = [] if self._variant else foreign_hooks(self._watch.hook_tables)
            foreign = [key for _, key, _ in hooks]
            if foreign == self._foreign:  # a library has added some, or another thread has tried them
                self._hook_keys = keys
                return
            modules = self._model.decoder.modules()
            inside = {id(t) for m in modules for t in (m._forward_pre_hooks, m._forward_hooks)}
            self._outside = [hook for hook in hooks if id(hook[0]) not in inside]
            text = self._difference(hooks, partial(_answers, self._model)) if hooks else ""
            self._trials = text, self._trials[1] if self._outside else ""
            self._hook_keys, self._foreign = keys, foreign

    def _try_outside(self, encode: Callable[[], Encoded], encoded: Encoded | None = None) -> None:
        """As `_try_hooks`, of hooks before the decoder: on an encoding, which may be there already."""
        with self._model.turns.alone():
            if self._outside:  # else another thread has tried them
                seen = None if encoded is None else tensor_digest(encoded.tensors)
                trial = self._difference(self._outside, lambda: tensor_digest(encode().tensors), seen)
                self._trials, self._outside = (self._trials[0], trial), []

    def _difference(self, hooks: list[Hook], run: Callable[[], str], seen: str | None = None) -> str:
        """What ``run`` gives with ``hooks``; "" if it gives the same without them."""
        seen = seen or run()  # work like any other, which a user's hook counts
        try:
            with unobserved(hooks):
                if run() == seen:
                    return ""
        except (RuntimeError, ValueError, TypeError, KameraError) as error:
            logger.info("without foreign hooks: %s", error)
        logger.warning(
            "hooks change what this %s computes: what it stores is private to this process, unless "
            "Backbone(model, variant=…) names it",
            self._model.facts.kind,
        )
        return seen

    def _refuse_other(self, before: tuple[str, str]) -> None:
        if self._trials != before:
            raise IncompatibleChunk(
                f"hooks that change what this {self._model.facts.kind} computes were registered or removed: "
                "undo that, or build chunk and window again (Backbone(model, variant=…) names such a model)"
            )


class _Watch:
    """What shows a change of a model, as flat lists that are compared in C.

    Everything compared is held, so that no new object takes an old one's address. Left out are frequencies
    that forwards choose.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        parts = (p for m in modules for p in (m._modules, m._parameters, m._buffers))
        chosen = {id(m._buffers) for m in modules if _chooses_frequencies(m)}
        self._parts: list[dict[str, Any]] = [part for part in parts if id(part) not in chosen]
        self._members = list(chain.from_iterable(map(_values, self._parts)))
        members = [t for t in self._members if isinstance(t, torch.Tensor)]
        self._tensors = [p for t in members for p in _parts_of(t) if p.layout is torch.strided]
        self._counted = [t for t in self._tensors if not t.is_inference()]  # the others keep no count
        # a few are read, all of one device: steps of fused optimizers are not counted
        few = [t for t in self._counted if t.requires_grad and t.is_contiguous() and t.numel()]
        few = [t for t in few if t.device == few[0].device][:: max(1, len(few) // _SAMPLED)]
        self._few = [t.detach().view(-1)[:_ELEMENTS].view(torch.uint8) for t in few]
        self.adapters = [m for m in modules if hasattr(m, "_active_adapter")]
        names = ("merged_adapters", "scaling")
        settings = [getattr(m, name, None) for m in self.adapters for name in names]
        self._settings = [value for value in settings if _is_plain(value)]
        self.hook_tables = hook_tables(modules)
        self._state = copy.deepcopy(self._look())

    def has_changed(self) -> bool:
        """True if a tensor was written or given other storage, or a tensor, module or adapter exchanged."""
        members = list(chain.from_iterable(map(_values, self._parts)))
        is_kept = len(members) == len(self._members) and all(map(is_, members, self._members))
        return not is_kept or self._look() != self._state

    def hook_keys(self) -> tuple[int, ...]:
        """The numbers of all hooks; none is given twice."""
        return tuple(chain.from_iterable(self.hook_tables))

    def _look(self) -> tuple[Any, ...]:
        return (
            sum(map(_version, self._counted)),
            list(map(_address, self._tensors)),
            list(map(_switches, self.adapters)),
            self._settings,
            torch.cat(self._few).tolist() if self._few else [],
        )


# -- what a fingerprint is made of -----------------------------------------------------------------


def _tolerance(model: HfEngine) -> float:
    """Half precision rounds at 2^-8, and a router that flips sends a token to another expert."""
    if model.dtype in (torch.float32, torch.float64):
        return 5e-3
    return 0.5 if model.routes else 0.1


def _layers_path(model: nn.Module, decoder: nn.Module) -> str:
    """Prefix of every name in the decoder's layers, the one part that no encoding depends on."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    return f"{path}.layers." if path else "layers."


def _weights_digests(model: nn.Module, layers: str) -> tuple[str, str]:
    """Digests of all that modules keep, by name and content: of the whole, and without ``layers``.

    That is what ``state_dict`` says, packed parameters and the state of quantisers included, and buffers
    that it leaves out.
    """
    state = {**model.state_dict(), **{name: b for name, b in model.named_buffers(remove_duplicate=False)}}
    modules = model.named_modules(remove_duplicate=False)
    chosen = tuple(f"{path}." for path, module in modules if _chooses_frequencies(module))
    names = [name for name in sorted(state) if not (name.endswith("inv_freq") and name.startswith(chosen))]
    whole, vision = (hashlib.blake2b(digest_size=32, person=b"kamera-weights") for _ in range(2))
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        for name, one in zip(names, pool.map(_content, map(state.__getitem__, names)), strict=True):
            for hasher in (whole,) if name.startswith(layers) else (whole, vision):
                hasher.update(digest(name, one).encode())
    return whole.hexdigest(), vision.hexdigest()


def _content(value: Any) -> str:
    """The content of an entry of a state: a tensor of any kind, a plain value, or several of them."""
    if isinstance(value, list | tuple):
        return digest("kamera.state.v1", *map(_content, value))
    if not isinstance(value, torch.Tensor):
        return repr(value) if _is_plain(value) or isinstance(value, torch.dtype) else type(value).__name__
    if value.is_meta:
        raise UnsupportedBackbone("weights are offloaded, so that they cannot be digested: load all of them")
    if hasattr(value, "__tensor_flatten__"):
        return digest(
            type(value).__qualname__, repr(value.__tensor_flatten__()[1]), *map(_content, _parts_of(value))
        )
    if value.is_quantized:
        axis = value.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        scales = (value.q_per_channel_scales(), value.q_per_channel_zero_points()) if axis else ()
        scheme = scales or (value.q_scale(), value.q_zero_point())
        return digest(str(value.qscheme()), *map(_content, scheme), tensor_digest(value.int_repr()))
    return tensor_digest(value if value.layout is torch.strided else value.to_dense())


def _parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or those that one packed in a way of its own consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts_of(getattr(tensor, name))


def _modules(model: nn.Module, without: str = "") -> list[Any]:
    """The class of every module, and of adapters what they are set to."""
    rows: list[Any] = []
    for name, module in model.named_modules():
        if not (without and f"{name}.".startswith(without)):
            plain = {n: v for n, v in vars(module).items() if _is_plain(v)}
            rows.append([name, type(module).__qualname__, plain if hasattr(module, "_active_adapter") else 0])
    return rows


def _active(adapter: Any) -> list[str]:
    names = adapter._active_adapter
    return [] if adapter._disable_adapters else [names] if isinstance(names, str) else list(names)


def _settings(config: Any) -> dict[str, Any]:
    """A config's settings but those of its origin, at any depth."""
    settings = config if isinstance(config, dict) else config.to_dict()
    return _without_private(drop_settings(settings, _ORIGIN))


def _without_private(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_private(one) for one in value]
    if isinstance(value, dict):
        return {str(n): _without_private(v) for n, v in value.items() if not str(n).startswith("_")}
    return value


def _attention(config: Any) -> str:
    """The kernel of a model's attention; "" for the usual ones, which are one arithmetic."""
    name = str(getattr(config, "_attn_implementation", None)).split("|")[-1]
    return "" if name in _SAME_ATTENTION or name.startswith("flash_attention") else name


def _chooses_frequencies(module: nn.Module) -> bool:
    """True if a rotary module chooses its ``inv_freq`` anew by the positions of a forward."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)


def _processor_digest(processor: Any | None) -> str:
    """Digest of all that decides a processor's output for a picture or a text."""
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    with exclusive_of(tokenizer):
        settings = _processor_settings(processor)
        if settings:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            # the last call's padding and truncation are no settings
            settings["tokenizer"] = (
                sorted(tokenizer.get_vocab().items())
                if backend is None
                else json.loads(backend.to_str()) | {"padding": None, "truncation": None}
            )
        return digest("kamera.processor.v1", _json(settings or None))


def _processor_settings(processor: Any | None) -> dict[str, Any]:
    if processor is None:
        return {}
    settings: dict[str, Any] = {"class": type(processor).__name__}
    for part in ("image_processor", "video_processor", "feature_extractor"):
        member = getattr(processor, part, None)
        if member is not None:
            settings[part] = {"class": type(member).__name__, **member.to_dict()}
    if hasattr(processor, "image_processor") is False and hasattr(processor, "to_dict"):
        settings["self"] = processor.to_dict()
    tokenizer = getattr(processor, "tokenizer", processor)
    settings["vocabulary"] = len(tokenizer)
    settings["chat_template"] = getattr(processor, "chat_template", None) or getattr(
        tokenizer, "chat_template", None
    )
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _json(value: Any) -> str:
    """The text of plain values; sets in order, all others by their classes."""

    def other(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        return str(value) if isinstance(value, torch.dtype | torch.device) else type(value).__qualname__

    return json.dumps(value, sort_keys=True, default=other)


# -- what hooks are tried on -----------------------------------------------------------------------


def _picture(model: HfEngine) -> Chunk | None:
    """A colourful square; None if the model cannot be shown one."""
    prompt = model.builder.format
    if prompt is None or not ("image" in prompt.kinds and model.builder.takes_pixels):
        return None
    ramp = np.arange(_SIDE * _SIDE * 3, dtype=np.uint64) * 2654435761 % 251
    try:
        picture = Image.fromarray(ramp.astype(np.uint8).reshape(_SIDE, _SIDE, 3))
        return model.builder.from_content(picture, "")
    except (KameraError, ValueError):  # a processor that wants other pictures
        return None


def _encode(model: HfEngine, chunk: Chunk) -> Encoded:
    positions = model.positions([chunk.input_ids], [chunk.position_inputs()])
    with torch.no_grad(), _without_autocast(model):
        return contents.encode(model.model, model.door, chunk, positions)


def _answers(model: HfEngine) -> str:
    """Digest of the KV and the logits of a text."""
    text = sample_text(model, _TOKENS)
    places = model.positions([text.input_ids, text.input_ids[-1:]], [{}, {}])
    with _without_autocast(model):
        kv, cache = forwards.run(model, text, places[:, :_TOKENS])
        logits = forwards.forward(model, text.input_ids[-1:], places[:, _TOKENS:], cache)
    return digest("kamera.trial.v1", *map(tensor_digest, (*kv_tensors(kv), logits)))


@contextmanager
def _without_autocast(model: HfEngine) -> Iterator[None]:
    with ExitStack() as off:
        for device in {p.device.type for p in model.model.parameters()}:
            off.enter_context(torch.autocast(device, enabled=False))
        yield
