"""Options of an answer: those of ``generate`` of transformers, checked before anything runs."""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any

from kamera.errors import first_line, quote

_GIVEN = frozenset(
    {
        "attention_mask",
        "cache_config",
        "cache_implementation",
        "input_ids",
        "inputs",
        "inputs_embeds",
        "kwargs",
        "past_key_values",
        "position_ids",
        "self",
        "transformers_version",
        "use_cache",
    }
)
"""Arguments of ``generate`` that are Kamera's to give, and names in its signature that are none."""

_INSTEAD = {
    "best_of": "num_return_sequences, of KameraWindow.generate",
    "frequency_penalty": "repetition_penalty",
    "logit_bias": "sequence_bias",
    "logprobs": "next_token_logits",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences, of KameraWindow.generate",
    "presence_penalty": "repetition_penalty",
    "seed": "torch.manual_seed before the call",
    "stop": "stop_strings",
    "stream": "streamer",
    "top_logprobs": "next_token_logits",
}
"""What serves for arguments of other interfaces."""

_COUNT = numbers.Integral, 1, math.inf, "a whole number from 1 on"
_SHARE = numbers.Real, 0, 1, "a number from 0 to 1"
_RANGES: dict[str, tuple[Any, float, float, str]] = {
    **dict.fromkeys(("max_new_tokens", "num_beams", "num_return_sequences"), _COUNT),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), _SHARE),
    "temperature": (numbers.Real, 0, math.inf, "a number from 0 on"),
}
"""Numbers by name: their kind, the least and the most, and both in words."""


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that ``model.generate`` does not take, or a value that it refuses."""
    from transformers import GenerationConfig

    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    option_names = (
        settings | {*inspect.signature(model.generate).parameters, "tokenizer", "assistant_tokenizer"}
    ) - _GIVEN
    for name in options:
        if name not in option_names:
            instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
            raise ValueError(
                f"{name[:80]}={quote(options[name])} is no option of an answer: {instead} (options are "
                "those of transformers' generate)"
            )
    base = options.get("generation_config") or model.generation_config
    if not isinstance(base, GenerationConfig):
        raise ValueError(f"generation_config={quote(base)} is none: give a GenerationConfig of transformers")
    for name, (kind, least, most, words) in _RANGES.items():
        value = options.get(name)
        number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (number and least <= value <= most):
            raise ValueError(f"{name}={quote(value)}: give {words}")
    config = copy.deepcopy(base)
    try:
        config.update(**{name: options[name] for name in options.keys() & settings})
        config.validate()
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"options {quote(dict(options))} are refused: {first_line(error)}") from None
    if config.do_sample and config.temperature == 0:
        raise ValueError("temperature=0 with sampling: use do_sample=False for the likeliest tokens")
