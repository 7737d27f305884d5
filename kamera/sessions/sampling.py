"""Options of an answer. One with a seed draws by itself: no other thread's draws come between."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from kamera.content import MOST_LIKELY
from kamera.engines import Engine
from kamera.errors import quote
from kamera.sessions.grammar import Bound
from kamera.sessions.stream import Stream

Options = Mapping[str, Any]
"""Options of an answer."""

_LARGEST = 2**63


class Seeded:
    """A logits processor that draws each token itself: greedy decoding behind it takes the one it left."""

    def __init__(self, seed: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool) or not -_LARGEST <= seed < _LARGEST:
            raise ValueError(f"seed={quote(seed)}: give a whole number of 64 bits")
        self._draws = torch.Generator().manual_seed(seed)
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[rows, vocabulary]`` of which one in each row is left."""
        logits = scores.float().cpu() / self._temperature
        if 0 < self._top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self._top_k).values[:, -1:], -torch.inf)
        if self._top_p < 1.0:
            probabilities, places = logits.softmax(-1).sort(descending=True)
            late = probabilities.cumsum(-1) - probabilities >= self._top_p
            late[:, 0] = False
            logits = logits.masked_fill(torch.zeros_like(late).scatter(-1, places, late), -torch.inf)
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=self._draws).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)


class Watched:
    """The logits processor of a stream: transformers reads the signature of a method anew at each token."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As `Stream.watch`."""
        return self._stream.watch(input_ids, scores)


def refuse_own_options(options: Mapping[str, Any], owner: type[Any]) -> None:
    """Raise ValueError for an option of an answer that is one of ``owner``'s construction."""
    own = inspect.signature(owner.__init__).parameters.keys() - {"self", "max_tokens"}
    for name in options.keys() & own:
        raise ValueError(
            f"{name}={quote(options[name])} is no option of an answer: give it to {owner.__name__}({name}=…)"
        )


def generate_options(
    engine: Engine,
    stream: Stream,
    options: dict[str, Any],
    seed: int | None,
    most: int | None,
    bound: Bound | None,
) -> dict[str, Any]:
    """Options of ``generate`` for an answer drawn with ``seed``, which ``stream`` follows from now on.

    ``most`` is the number of likeliest tokens to note; ``bound``, if there is one, the answer's grammar.
    Raises ValueError for what an answer does not take.
    """
    engine.check_sampling(options)
    if int(options.get("num_return_sequences") or 1) > 1:
        raise ValueError(f"num_return_sequences={options['num_return_sequences']}: a turn has one answer")
    is_count = isinstance(most, int) and not isinstance(most, bool) and 0 <= most <= MOST_LIKELY
    if most is not None and not is_count:
        raise ValueError(f"logprobs={quote(most)}: give the number of likeliest tokens, 0 to {MOST_LIKELY}")
    config = options.get("generation_config") or engine.builder.generation_config
    beams = int(options.get("num_beams") or getattr(config, "num_beams", None) or 1)
    if beams > 1 and (most is not None or bound is not None):
        raise ValueError("logprobs and grammars are of an answer made token by token: use no beams")
    stream.begin(engine, most, None if bound is None else bound.mask(engine, closing_ids(engine, options)))
    if "stop_strings" in options:
        processor = engine.processor
        options = {"tokenizer": getattr(processor, "tokenizer", processor), **options}
    options = with_seed(options, seed)
    return {
        **options,
        "logits_processor": [Watched(stream), *(options.get("logits_processor") or ())],
        "stopping_criteria": [*(options.get("stopping_criteria") or ()), stream],
    }


def closing_ids(engine: Engine, options: Options) -> frozenset[int]:
    """Ids of the tokens that end an answer, as its options, the model's settings and its tokenizer say."""
    processor, config = engine.processor, options.get("generation_config")
    named = options.get("eos_token_id") or getattr(config, "eos_token_id", None)
    named = named or getattr(engine.builder.generation_config, "eos_token_id", None)
    tokenizers = getattr(getattr(processor, "tokenizer", processor), "eos_token_id", None)
    ids = named if isinstance(named, list | tuple) else [named]
    return frozenset(i for i in (*ids, tokenizers) if isinstance(i, int))


def with_seed(options: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """Options of an answer whose tokens are drawn with ``seed``; as they are without one, or if greedy.

    Temperature, top_k and top_p are those of ``options``, else 1.0, none and none. Raises ValueError for a
    seed that is no whole number, and for a temperature of 0.
    """
    if seed is None:
        return options
    names = ("temperature", "top_k", "top_p")
    sampler = Seeded(seed, **{name: options[name] for name in names if options.get(name) is not None})
    if not options.get("do_sample", True):
        return options
    if options.get("temperature") == 0:
        raise ValueError("temperature=0 with a seed: use do_sample=False for the likeliest tokens")
    rest = {name: value for name, value in options.items() if name not in (*names, "do_sample")}
    return {
        **rest,
        "do_sample": False,
        "logits_processor": [*(rest.get("logits_processor") or ()), sampler],
    }
