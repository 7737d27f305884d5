"""Forwards of a model behind caches of transformers, and the memory that they run in.

KV is causal: spans that follow each other are one span, whose KV is split at the borders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import contents
from kamera.engines.hf.cache import ModelCache
from kamera.engines.hf.sampling import read_options
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, Blocks, check_finite, kv_concat, kv_copy, kv_slice, kv_tokens

if TYPE_CHECKING:
    from kamera.engines.hf.engine import HfEngine


def join_spans(
    model: HfEngine, spans: Sequence[Encoded], positions: Sequence[torch.Tensor]
) -> Encoded | None:
    """Spans that follow each other as one; None if the decoder cannot take them in one call.

    ``positions`` ``[axes, tokens]`` of each. Text beside pictures is embedded as the outer model does it,
    without a forward of the decoder. None for a model that makes its mask from token types, and for an
    argument of the decoder that has no entry per token.
    """
    ids = torch.cat([span.input_ids for span in spans])
    if not any(span.tensors for span in spans):
        return Encoded(ids)
    if not model.facts.joins:
        return None
    with torch.no_grad(), model.turns.alone():  # texts as the outer model gives them beside pictures
        rows = [
            span.tensors or contents.text_tensors(model.model, model.door, span.input_ids, places)
            for span, places in zip(spans, positions, strict=True)
        ]
    like = {name: tensor for row in rows for name, tensor in row.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name in like:
        if contents.is_flat(name):
            tensors[name] = torch.cat([row[name] for row in rows if name in row])
            continue
        parts = []
        for span, row in zip(spans, rows, strict=True):
            part = row.get(name)
            if part is None and (name == contents.SEEN or name.endswith("token_type_ids")):
                part = torch.zeros(1, span.num_tokens, dtype=like[name].dtype)  # text
            if part is None or part.dim() < 2 or part.shape[:2] != (1, span.num_tokens):
                return None
            parts.append(part)
        device = parts[0].device
        tensors[name] = torch.cat([part.to(device) for part in parts], dim=1)
    return Encoded(ids, {}, tensors)


def split(kv: KV, lengths: Sequence[int]) -> tuple[KV, ...]:
    """Copies of consecutive spans of ``lengths`` tokens out of the KV of all."""
    stops = list(accumulate(lengths))
    starts = [0, *stops[:-1]]
    return tuple(kv_copy(kv_slice(kv, a, b)) for a, b in zip(starts, stops, strict=True))


def run(
    model: HfEngine, encoded: Encoded, positions: torch.Tensor, past: ModelCache | None = None
) -> tuple[KV, ModelCache]:
    """Run a span through the decoder at explicit ``positions`` ``[axes, tokens]`` behind ``past``.

    Extends ``past`` in place. Returns views of the new tokens' KV, and the cache. Raises NonFiniteKV.
    """
    past = model_cache.new_cache(model.model.config) if past is None else past
    start = model_cache.cache_length(past)
    run_decoder(model, [encoded], positions[:, None], past)
    kv = model_cache.read(past, model.layout, model.groups, start)
    check_finite(kv)
    return kv, past


def row_form(model: HfEngine, span: Encoded) -> Hashable | None:
    """A key, equal for spans that may be rows of one forward: same tensors of same shapes. None for others.

    Three kinds run alone: spans whose mask the outer model makes, those with an argument that is not one
    row long, and all spans of a decoder with experts, since the number of tokens an expert gets, and so its
    arithmetic, depends on the other rows.
    """
    if model.routes or (not model.facts.joins and span.tensors):
        return None
    if any(t.dim() < 2 or (t.shape[0] != 1 and not contents.is_flat(n)) for n, t in span.tensors.items()):
        return None
    shapes = sorted((n, tuple(t.shape), str(t.dtype)) for n, t in span.tensors.items())
    return (span.num_tokens, *shapes)


def run_rows(
    model: HfEngine, spans: Sequence[Encoded], positions: Sequence[torch.Tensor], past: ModelCache
) -> tuple[KV, ...]:
    """KV of each span at its positions ``[axes, tokens]`` behind ``past``, in one forward.

    Rows do not see each other. A row's KV may differ in bits from that of a forward of its own: matrix
    kernels are chosen by shape; who needs equal bits must check (`kamera.compile`). ``past`` must not be used
    again. Raises ValueError for spans that do not share a `row_form`, NonFiniteKV.
    """
    forms = {row_form(model, span) for span in spans}
    if len(forms) != 1 or None in forms:
        raise ValueError(f"{len(spans)} spans of different forms cannot share a forward: prefill them alone")
    model_cache.detach(past)  # the caller owns what is returned, of one span too
    rows, start = model_cache.share_rows(past, len(spans)), model_cache.cache_length(past)
    run_decoder(model, spans, torch.stack(list(positions), dim=1), rows)
    kvs = [model_cache.read(rows, model.layout, model.groups, start, row=i) for i in range(len(spans))]
    for kv in kvs:
        check_finite(kv)
    return tuple(kvs)


def forward(model: HfEngine, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
    """Next-token logits ``[vocabulary]`` after text ``ids`` behind ``past``, which is extended."""
    return next_logits(model, ids[None], positions[:, None], past)[0]


def forward_batch(
    model: HfEngine, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache, keep: int = 0
) -> torch.Tensor:
    """Logits ``[rows, keep, vocabulary]`` after the last ``keep`` tokens of texts ``ids`` ``[rows, tokens]``.

    0: after each token. Every row is at the same ``positions`` behind the same ``past``, which must not be
    used again.
    """
    rows = len(ids)
    places = positions[:, None].expand(-1, rows, -1)
    return _logits(model, ids, places, model_cache.share_rows(past, rows), keep)


def next_logits(
    model: HfEngine,
    ids: torch.Tensor,
    positions: torch.Tensor,
    past: ModelCache,
    span: Encoded | None = None,
) -> torch.Tensor:
    """Next-token logits ``[rows, vocabulary]`` after ``ids`` ``[rows, tokens]`` behind ``past``.

    ``positions`` are ``[axes, rows, tokens]``; ``past`` is extended. One row may have many tokens, and
    ``span``, its content if that is not all text; several have one token each (`join_as_rows`).
    """
    device = contents.input_device(model.model)
    mask = model_cache.row_mask(past, device)
    content = {} if span is None else contents.decoder_arguments(span, device)
    with model.door.substitute_inputs(content) if content else nullcontext():
        return _logits(model, ids, positions, past, 1, mask)[:, -1]


def generate(
    model: HfEngine, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache, **options: Any
) -> torch.Tensor:
    """``generate`` of transformers over the whole sequence ``ids`` of which ``past`` holds a prefix.

    ``positions`` are those of the whole sequence, of which each row of ``past`` is one. Returns new tokens,
    ``[sequences, new]``.
    """
    model.limits.check_tokens(positions)
    sequence = ids[None].to(contents.input_device(model.model))
    with torch.no_grad(), model.turns.forward_turn(alone=not model.quiet, pauses=model.quiet):
        out = model.model.generate(
            input_ids=sequence,
            attention_mask=torch.ones_like(sequence),
            position_ids=contents.with_batch(positions).to(sequence.device),
            past_key_values=past,
            **options,
        )
    return new_tokens(out, len(ids))


def new_tokens(out: Any, prompt: int) -> torch.Tensor:
    """Tokens ``[sequences, new]`` behind those of the ``prompt``, of what ``generate`` returned."""
    tokens: torch.Tensor = out if isinstance(out, torch.Tensor) else out.sequences
    return tokens[:, prompt:].cpu()


def make_cache(model: HfEngine, spans: Sequence[KV]) -> ModelCache:
    """A cache that holds ``spans`` one after another (copied when more than one)."""
    kvs = [s for s in spans if s.groups]
    kv = kv_concat(kvs) if len(kvs) > 1 else kvs[0] if kvs else allocate_kv(model, 0)
    tokens = kv_tokens(kv)  # nothing is written into the spans
    return model_cache.growing_cache(model.model.config, model.layout, kv, 0, tokens, tokens)


def allocate_kv(model: HfEngine, tokens: int) -> KV:
    """Uninitialised KV of ``tokens`` tokens, every layer on the model's device for it."""
    return Blocks(
        [
            {
                c.name: torch.empty(len(g), c.heads, tokens, c.dim, dtype=model.dtype, device=device)
                for c in model.layout[g[0]].channels
            }
            for g, device in zip(model.groups, model.devices, strict=True)
        ],
        model.groups,
    )


def _logits(
    model: HfEngine,
    ids: torch.Tensor,
    positions: torch.Tensor,
    past: ModelCache,
    keep: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """After the last ``keep`` of ``ids`` ``[rows, tokens]`` at ``positions`` ``[axes, rows, tokens]``."""
    model.limits.check_tokens(positions)
    device = contents.input_device(model.model)
    with torch.no_grad(), model.turns.forward_turn(alone=not model.quiet, pauses=model.quiet):
        out = model.model(
            input_ids=ids.to(device),
            attention_mask=mask,
            position_ids=(positions if len(positions) > 1 else positions[0]).to(device),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=keep,
        )
    logits: torch.Tensor = out.logits[:, -keep:]  # some classes know no `logits_to_keep`, and give all
    return logits


def run_decoder(
    model: HfEngine,
    spans: Sequence[Encoded],
    positions: torch.Tensor,
    past: ModelCache,
    mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
) -> None:
    """Run spans, each a row, through the decoder at ``positions`` ``[axes, rows, tokens]``, behind ``past``.

    ``past`` is extended. With a ``mask`` the decoder makes none.
    """
    model.limits.check_tokens(positions)
    device, decoder = contents.input_device(model.model), model.decoder
    rows = [contents.decoder_arguments(span, device) for span in spans]
    arguments: dict[str, Any] = {name: _stack([row[name] for row in rows]) for name in rows[0]}
    kinds = spans[0].position_inputs.get(model.mask_input or "")
    if kinds is not None and spans[0].tensors:
        # The outer model derives the mask from token types over the cached tokens too; image
        # blocks never cross a chunk, so the tokens before count as text.
        past_kinds = kinds.new_zeros(model_cache.cache_length(past))
        arguments[str(model.mask_input)] = torch.cat([past_kinds, kinds])[None].to(device)
        decoder = model.model.model
    elif mask is not None:
        arguments["attention_mask"] = mask
    places = (positions if len(positions) > 1 else positions[0]).to(device)
    with torch.no_grad(), model.turns.forward_turn(alone=True, pauses=model.quiet):
        decoder(**arguments, position_ids=places, past_key_values=past, use_cache=True)


def attention(
    model: HfEngine, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache
) -> list[torch.Tensor]:
    """Where text ``ids`` ``[tokens]`` at ``positions`` ``[axes, tokens]`` behind ``past`` attends to.

    One ``[heads, tokens, past + tokens]`` for each layer, whose rows sum to one. ``past`` is extended. The
    layers run in the plain kernel, the only one that tells its weights. Raises UnsupportedBackbone for a
    model that tells none.
    """
    model.limits.check_tokens(positions)
    with torch.no_grad(), model.turns.alone():
        kernel = model.model.config._attn_implementation
        model.model.set_attn_implementation("eager")
        try:
            out = model.decoder(
                input_ids=ids[None].to(contents.input_device(model.model)),
                position_ids=contents.with_batch(positions).to(contents.input_device(model.model)),
                past_key_values=past,
                use_cache=True,
                output_attentions=True,
            )
        finally:
            model.model.set_attn_implementation(kernel)
    weights = [layer for layer in out.attentions or () if layer is not None]
    if not weights:
        raise UnsupportedBackbone(f"{model.facts.kind} does not tell what its layers attend to")
    return [layer[0] for layer in weights]


def _stack(rows: Sequence[Any]) -> Any:
    """One argument of all rows; of a list of tensors, item by item."""
    if len(rows) == 1:
        return rows[0]
    if isinstance(rows[0], list):
        return [torch.cat(items) for items in zip(*rows, strict=True)]
    return torch.cat(list(rows))


@contextmanager
def restore_state(model: nn.Module) -> Iterator[None]:
    """Give a model back what its own forward keeps from call to call (``rope_deltas``), also after an error.

    Forwards at explicit positions keep nothing; those of a whole prompt do.
    """
    spaces = [vars(module) for module in model.modules()]
    kept = [{n: v for n, v in space.items() if v is None or isinstance(v, torch.Tensor)} for space in spaces]
    try:
        yield
    finally:
        for space, old in zip(spaces, kept, strict=True):
            space.update({name: value for name, value in old.items() if space.get(name) is not value})


class TransformersModel:
    """The `PlainModel` of an `HfEngine`. Inputs that the model's forward lacks are left out."""

    def __init__(self, model: HfEngine) -> None:
        self._model = model

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with self._model.turns.alone(), torch.no_grad(), restore_state(self._model.model):
            logits: torch.Tensor = self._model.model(**self._accept(inputs)).logits[0, -1]
        return logits

    def generate(self, inputs: Mapping[str, torch.Tensor], **sampling: Any) -> torch.Tensor:
        method = read_options(self._model.model, sampling)  # drafts change no answer
        with self._model.turns.alone(), torch.no_grad(), restore_state(self._model.model):
            out = self._model.model.generate(**self._accept(inputs), **method.options)
        tokens = new_tokens(out, inputs["input_ids"].shape[1])
        method.follow(inputs["input_ids"], tokens)
        return tokens

    def _accept(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = inputs.keys() & {*self._model.builder.accepted}
        return {name: inputs[name].to(contents.input_device(self._model.model)) for name in names}
