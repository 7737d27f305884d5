"""Options of an answer: those of ``generate`` of transformers, checked before anything runs."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
    **dict.fromkeys(
        (
            "max_new_tokens",
            "num_beams",
            "num_return_sequences",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), _SHARE),
    "temperature": (numbers.Real, 0, math.inf, "a number from 0 on"),
}
"""Numbers by name: their kind, the least and the most, and both in words."""

_SECOND_PROMPT = "it runs the model over another prompt, which no window holds"
_OTHER_LOOP = "it decodes by a loop that runs the whole prompt again"
_REFUSED: dict[str, tuple[Any, str]] = {
    "assistant_early_exit": (None, "it drafts with layers of the model over the whole prompt"),
    "assistant_ensemble_weight": (None, "it mixes the assistant's probabilities into the model's"),
    "assistant_tokenizer": (None, "give an assistant_model with the model's own vocabulary"),
    "constraints": (None, _OTHER_LOOP),
    "custom_generate": (None, _OTHER_LOOP),
    "dola_layers": (None, _OTHER_LOOP),
    "force_words_ids": (None, _OTHER_LOOP),
    "guidance_scale": (1, _SECOND_PROMPT),
    "is_assistant": (False, "it is for a model that drafts for another"),
    "negative_prompt_attention_mask": (None, _SECOND_PROMPT),
    "negative_prompt_ids": (None, _SECOND_PROMPT),
    "num_beam_groups": (1, _OTHER_LOOP),
    "penalty_alpha": (0, _OTHER_LOOP),
    "speculation_type": (None, "it drafts from hidden states of the whole prompt"),
    "token_healing": (False, "it writes the end of the prompt anew"),
    "use_mtp": (False, "it drafts from hidden states of the whole prompt"),
}
"""Options that read the prompt again, or another one: the value at which each is none, and why."""

_OWN = {"use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
"""How the prompt is run, which a window decides: whatever a model's own settings say of it."""


@dataclass(frozen=True, eq=False)
class Method:
    """How an answer is decoded, as `read_options` says.

    ``options`` are those of ``generate``, but for drafts. It has ``rows``: one answer is made token by token,
    several are those of beam search or several answers. ``assistant`` and ``lookup`` draft tokens that the
    model only has to confirm: a model, and the number of tokens taken from the prompt (None: no drafts).
    """

    options: dict[str, Any]
    rows: int
    assistant: Any = None
    lookup: int | None = None

    @property
    def drafts(self) -> bool:
        """True if tokens are drafted."""
        return self.assistant is not None or self.lookup is not None

    def follow(self, prompt: torch.Tensor, tokens: torch.Tensor) -> None:
        """Show the stopping criteria the ``tokens`` ``[1, new]`` of an answer that was searched by beams.

        Of several answers, none: criteria follow one.
        """
        if self.rows > 1 and len(tokens) == 1:
            whole = torch.cat([prompt.reshape(-1).to(tokens), tokens[0]])[None]
            for criterion in self.options.get("stopping_criteria") or ():
                criterion(whole, None)


def read_options(model: Any, options: Mapping[str, Any]) -> Method:
    """How ``model`` makes an answer with ``options``. Raises ValueError for an option that is none.

    And for a value that ``generate`` refuses, and what runs over the prompt again. Settings that ``options``
    leave out are the model's own, as for ``generate``.
    """
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
    given = {name: options[name] for name in options.keys() & settings}
    try:
        config, _ = model._prepare_generation_config(options.get("generation_config"), **given)
        config.validate()
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"options {quote(dict(options))} are refused: {first_line(error)}") from None
    if config.do_sample and config.temperature == 0:
        raise ValueError("temperature=0 with sampling: use do_sample=False for the likeliest tokens")
    _refuse(options, config)
    rest = {name: value for name, value in options.items() if name != "assistant_model"}
    assistant, lookup = options.get("assistant_model"), config.prompt_lookup_num_tokens
    rows = max(int(config.num_beams or 1), int(config.num_return_sequences or 1))
    if rows > 1 and (assistant is not None or options.get("prompt_lookup_num_tokens")):
        raise ValueError(f"{rows} beams or answers with drafted tokens: use either")
    if assistant is not None:
        _check_assistant(model, assistant)
    rest |= _OWN | {"prompt_lookup_num_tokens": None}
    return Method(rest, rows) if rows > 1 else Method(rest, 1, assistant, lookup)


def _refuse(options: Mapping[str, Any], config: Any) -> None:
    for name, (off, why) in _REFUSED.items():
        value = options.get(name)
        value = getattr(config, name, None) if value is None else value
        if value is not None and value is not off and not (isinstance(value, int | float) and value == off):
            where = "" if options.get(name) is not None else " of the generation_config"
            raise ValueError(f"{name}={quote(value)}{where} is no option behind a cache: {why}; leave it out")


def _check_assistant(model: Any, assistant: Any) -> None:
    """Raise ValueError for an assistant whose drafts are not tokens of ``model``, or that cannot draft."""
    config = getattr(assistant, "config", None)
    takes_ids = "input_ids" in inspect.signature(getattr(assistant, "forward", _check_assistant)).parameters
    if config is None or not takes_ids or not getattr(assistant, "can_generate", bool)():
        raise ValueError(
            f"assistant_model={quote(assistant)} cannot draft: give a loaded language model of transformers"
        )
    own, other = (c.get_text_config().vocab_size for c in (model.config, config))
    if own != other or config.is_encoder_decoder:
        raise ValueError(
            f"assistant_model of a vocabulary of {other} tokens, this model has {own}: give a decoder with "
            "the model's own vocabulary"
        )
