"""Load a model and its processor from a directory or a hub name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kamera import forks
from kamera.content import load_image_only
from kamera.engines.checkpoint import checkpoint_fingerprint, files_of
from kamera.engines.hf.shipped import source_of
from kamera.errors import UnsupportedBackbone, first_line, quote

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

_PLACING = frozenset(
    {
        "attn_implementation",  # another arithmetic shows as foreign code
        "cache_dir",
        "device_map",
        "local_files_only",
        "low_cpu_mem_usage",
        "max_memory",
        "token",
        "use_safetensors",
    }
)
"""Options of transformers' loading that change no number of the model."""


def hide_progress() -> None:
    """Load without transformers' own progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def dtype_of(value: Any) -> str | torch.dtype:
    """A dtype of floats from torch, by its name or a short one ("bf16"); "auto" is that of the checkpoint.

    Raises ValueError for any other.
    """
    if isinstance(value, str):
        name = value.lower().removeprefix("torch.")
        if name == "auto":
            return name
        dtype = getattr(torch, _DTYPES.get(name, name), None) if name else None
    else:
        dtype = value
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"dtype {quote(value)} is none of auto, bfloat16 (bf16), float16 (fp16), float32 (fp32): give "
            "one of them, or a torch.dtype of floats"
        )
    return dtype


def device_of(value: Any) -> torch.device:
    """A device that holds tensors here. Raises ValueError for any other."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"device {quote(value)} cannot be used here: {first_line(error)}; give one that can, such as cpu"
        ) from None
    return device


_loading = forks.Lock()
"""Held while transformers loads a model: of two that load at once, one may end without weights."""


def load_model(name: str | Path, *, dtype: str | torch.dtype, **options: Any) -> nn.Module:
    """The model in eval mode, through its image-text class when it has one, else the causal LM class."""
    source = str(source_of(name))
    loader, _ = _class_of(source)
    try:
        with _loading:
            model: nn.Module = loader.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedBackbone(f"{quote(name)} does not load: {first_line(error)}") from error
    return model.eval()


def skeleton(name: str | Path, *, dtype: str | torch.dtype) -> nn.Module:
    """The model without its weights: every tensor has a shape alone. Raises as `load_model`."""
    import transformers

    source = str(source_of(name))
    loader, config = _class_of(source)
    dtype = config.dtype or config.get_text_config().dtype if dtype == "auto" else dtype
    if dtype is None:
        raise UnsupportedBackbone(f"{quote(name)} names no dtype in its configuration: give one")
    with _loading, torch.device("meta"):
        factory = loader._from_config if issubclass(loader, nn.Module) else loader.from_config
        model: Any = factory(config, dtype=dtype)
    with suppress(OSError):  # it has none of its own
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return cast(nn.Module, model.eval())


def _class_of(source: str) -> tuple[Any, Any]:
    """The class of transformers that loads a model, and the model's configuration."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedBackbone(f"no transformers model at {quote(source)}: {first_line(error)}") from None
    for loader in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        if type(config) in loader._model_mapping:
            return loader, config
    thinker = _thinker(transformers, config)
    if thinker is None:
        raise UnsupportedBackbone(
            f"{quote(source)} is a {config.model_type}, which transformers loads as neither an "
            "image-text nor a causal language model: load it yourself and pass Backbone(model)"
        )
    return thinker, thinker.config_class.from_pretrained(source)


def load_processor(name: str | Path) -> Any | None:
    """The processor, else the tokenizer, else None when the directory has neither.

    Where torchvision is missing, a vision model whose own processor needs it gets one for pictures only. One
    that cannot be had says why in its ``lacks``, by kind of media.
    """
    import transformers

    source, processor, reason = str(source_of(name)), None, ""
    for loader in (transformers.AutoProcessor, transformers.AutoTokenizer):
        try:
            processor = loader.from_pretrained(source)
            break
        except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
            reason = reason or (first_line(error) if isinstance(error, ImportError) else "")
    if getattr(getattr(processor, "tokenizer", processor), "vocab_size", 2) <= 1:
        processor = None  # transformers' result for a directory without tokenizer files
    if getattr(processor, "image_processor", None) is not None:
        return processor
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        return load_image_only(source, config.model_type) or processor
    except ImportError as error:
        reason = first_line(error)
    except (OSError, ValueError):
        pass
    if processor is not None and reason:
        processor.lacks = dict.fromkeys(("image", "video"), reason)
    return processor


def _thinker(transformers: Any, config: Any) -> Any | None:
    """The class of an Omni model's thinker, the one of its models that sees and answers; None for others."""
    for prefix in ("Qwen2_5Omni", "Qwen3OmniMoe"):
        if type(config).__name__.startswith(prefix):
            return getattr(transformers, f"{prefix}ThinkerForConditionalGeneration", None)
    return None


def folder_of(name: str | Path) -> Path:
    """The folder of a model's files on this machine. Raises OSError for a name whose files are not here."""
    from transformers.utils.hub import cached_file

    folder = Path(source_of(name))
    if folder.is_dir():
        return folder
    return Path(str(cached_file(str(folder), "config.json", local_files_only=True))).parent


def files_behind(name: str | Path, options: Mapping[str, Any]) -> tuple[Path, Any] | None:
    """The folder that a model is loaded from, and the state of its files.

    None if ``options`` load something else, or if they are not here.
    """
    with suppress(OSError):
        if not options.keys() - _PLACING:
            folder = folder_of(name)
            return folder, files_of(folder)
    return None


def fingerprint_of(files: tuple[Path, Any] | None, dtype: str) -> str | None:
    """`checkpoint_fingerprint` of `files_behind` a model; None if they have changed since, or have none."""
    with suppress(OSError, UnsupportedBackbone):
        if files is not None:
            fingerprint = checkpoint_fingerprint(files[0], dtype=dtype)
            return fingerprint if files_of(files[0]) == files[1] else None
    return None
