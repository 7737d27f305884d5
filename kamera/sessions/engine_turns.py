"""Turns of sessions over an engine that schedules by itself, such as vLLM's server, which answers them."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kamera.content import Chunk, Conversations, Message, Rendered, kind_of
from kamera.engines import (
    Completes,
    Engine,
    EngineCompletion,
    EngineSampling,
    Spent,
    join_pieces,
    open_accounts,
)
from kamera.errors import UnsupportedByEngine
from kamera.patches import Priority, background_of
from kamera.sessions.anchors import Anchors, conversations_of
from kamera.sessions.grammar import Bound
from kamera.sessions.layout import Layout, SessionWindow, choices, count_anchor_segments, mode_of
from kamera.sessions.ordering import Orders
from kamera.sessions.stream import Options, Stream, TurnReport, generate_options
from kamera.store import ChunkStore
from kamera.trust import Guarantee, weakest
from kamera.window import ANSWER, Dialogue, EngineWindow, Slot

logger = logging.getLogger(__name__)

_LEADS = 2
"""The first chunks of a window: should the first one leave, the next one leads, exact as a canonical."""

_OPTION_NAMES = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k")


class Opening(Conversations):
    """Renders conversations so that the tokens which open the first turn belong to the system prompt.

    An engine that renders messages itself can then be shown a picture behind the system prompt alone.
    """

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> Rendered:
        """As `Conversations.render`."""
        prompt = super().render(messages, tools=tools)
        at = count_anchor_segments(prompt)
        text = prompt.segments[at] if at < len(prompt.segments) else None
        tags = [tag for tag in prompt.tags if text is not None and text.start == tag[0] < tag[1] <= text.stop]
        if text is None or text.media is not None or not tags or tags[0][1] > prompt.stable:
            return prompt
        cut = prompt.recut(tags[:1])
        opening = replace(cut.segments[at], role="")
        return replace(cut, segments=(*cut.segments[:at], opening, *cut.segments[at + 1 :]))


class EngineAnchors(Anchors):
    """Opens windows over an ``engine``; see `Anchors`, whose ``backbone`` makes tokens and chunks alone."""

    def __init__(self, engine: Completes, backbone: Engine, store: ChunkStore, **options: Any) -> None:
        conversations = conversations_of(backbone, Opening)
        super().__init__(backbone, store, **{**options, "conversations": conversations})
        self.engine = engine
        if options.get("listener") is not None:
            refuse_over_engine(self, "a trace")

    def open(self, ids: torch.Tensor) -> tuple[EngineWindow, Spent]:
        """A window without chunks, whose anchor the engine computes with the first prompt."""
        options: dict[str, Any] = {"policy": self.policy, "max_tokens": self.max_tokens, "system": ids}
        name = self.backbone.fingerprint
        return EngineWindow(self.engine, self.backbone, self.store, fingerprint=name, **options), Spent()

    def prepare(self, window: SessionWindow | None) -> None:
        """Have the engine prefill what may lead a window next, as background work (`EngineWindow.keep`)."""
        if not isinstance(window, EngineWindow):
            return
        branch = self.fork(window)

        def work() -> None:
            branch.keep(_LEADS)

        queue = background_of(self.backbone)
        self.store.awaited[id(queue)] = queue.flush  # no work meets a closed store
        queue.add(work, Priority.GUESS, dropped=logger.info)


def anchors_over(engine: Completes | None, backbone: Engine, store: ChunkStore, **options: Any) -> Anchors:
    """Anchors of the backbone's own windows, or of those over an engine."""
    if engine is None:
        return Anchors(backbone, store, **options)
    return EngineAnchors(engine, backbone, store, **options)


def refuse_over_engine(anchors: Anchors, feature: str) -> None:
    """Raise UnsupportedByEngine for what takes a model and a live cache, over an engine."""
    if isinstance(anchors, EngineAnchors):
        raise UnsupportedByEngine(f"{feature}: model and KV are an engine's; use a session without one")


def answer_options(
    anchors: Anchors,
    stream: Stream,
    options: dict[str, Any],
    seed: int | None,
    logprobs: int | None,
    bound: Bound | None,
) -> dict[str, Any]:
    """Options of an answer that ``stream`` follows from now on, and that is ``bound`` to a grammar.

    Raises UnsupportedByEngine for those that an engine lacks.
    """
    if not isinstance(anchors, EngineAnchors):
        return generate_options(anchors.backbone, stream, options, seed, logprobs, bound)
    stream.begin(anchors.backbone)
    other = [name for name in options if name not in _OPTION_NAMES] + ["logprobs"] * (logprobs is not None)
    if other:
        raise UnsupportedByEngine(
            f"{', '.join(other)}: an engine's answer takes {', '.join(_OPTION_NAMES)} and seed"
        )
    draws = options.get("do_sample", seed is not None)
    temperature = float(options.get("temperature") or 1.0) if draws else 0.0
    fields: dict[str, Any] = (
        {"top_p": options.get("top_p"), "top_k": options.get("top_k"), "seed": seed} if draws else {}
    )
    fields |= {} if bound is None else {"structured_outputs": bound.for_vllm()}
    sampling = EngineSampling(temperature, stop=stream.stop, **fields)
    tokens = options.get("max_new_tokens") or ANSWER
    return {"max_new_tokens": tokens, "stream": stream, "sampling": sampling}


def show_by_engine(
    anchors: Anchors,
    window: EngineWindow,
    orders: Orders,
    modes: Sequence[str],
    dialogue: Dialogue,
    options: Options | None,
    start_time: float,
) -> tuple[Layout, TurnReport, str | None]:
    """Bring an engine's window to a prompt, by rows alone; with ``options`` the engine answers.

    The least strict of the ways that ``modes`` allow is taken: no other runs fewer tokens. Raises WindowFull,
    UnsupportedByEngine for clips, and EngineFailed.
    """
    if any(m.kind != "image" for m in orders.prompt.media.values()):
        raise UnsupportedByEngine("a clip: an engine is shown pictures and text alone")
    window.policy = policy = anchors.policy or window.policy
    slots, on_leave = window.slots, choices(modes, policy.minimum)[0]
    order = orders.under(on_leave)
    pictures = {i.id: i.picture for i in order.items if isinstance(i, Chunk) and i.picture is not None}
    minimum: Guarantee = "exact" if on_leave == "exact" else policy.minimum
    policy = replace(policy, on_leave=on_leave, minimum=minimum)
    window.arrange(order.items, pictures, policy, fills=options is not None)
    reply, answer, seconds = None, None, time.perf_counter() - start_time
    if options is not None:
        reply = _answer(window, dialogue, options)
        answer = anchors.backbone.builder.detokenize(torch.tensor(reply.token_ids, dtype=torch.int64)) or ""
    report = _report(slots, window, orders.prompt, reply, seconds=seconds, mode=mode_of(on_leave))
    return order.layout, report, answer


def _answer(window: EngineWindow, dialogue: Dialogue, options: Options) -> EngineCompletion:
    """The engine's answer, as it was watched; what it ran is on the accounts of the call."""
    prompt = window.prompt(dialogue, options["max_new_tokens"], options["sampling"])
    reply = join_pieces(_watch(window.engine.stream(prompt), options["stream"]))
    for account in open_accounts():
        account.add(reply.cost)
    return reply


def _watch(pieces: Iterator[EngineCompletion], stream: Stream) -> Iterator[EngineCompletion]:
    """The pieces of an answer, which ends where ``stream`` says so."""
    ids: list[int] = []
    try:
        for piece in pieces:
            for token in piece.token_ids:
                row = torch.tensor([ids], dtype=torch.int64)
                stream.watch(row, row)
                ids.append(token)
            yield piece
            if piece.token_ids and bool(stream(torch.tensor([ids]), None)):
                return
    finally:
        if isinstance(pieces, Generator):  # an answer that nobody waits for ends
            pieces.close()


def _report(
    old_slots: Sequence[Slot],
    window: EngineWindow,
    prompt: Rendered,
    reply: EngineCompletion | None,
    **fields: Any,
) -> TurnReport:
    """The report of a turn: what the engine computed, as it says, or is expected to without an answer.

    What was not computed counts as patched or turned where the store supplies it so, else as kept.
    """
    old_chunks = {slot.start: (slot.chunk_id, slot.antecedents) for slot in old_slots}
    new = [s for s in window.slots if old_chunks.get(s.start) != (s.chunk_id, s.antecedents)]
    supplied_tokens = sum(s.length for s in window.slots if s.origin != "computed")
    cached_tokens, notes = supplied_tokens, list[str]()
    if reply is not None and reply.prompt_tokens:
        cached_tokens = max(0, reply.cached_tokens - window.filled)
        if reply.prompt_tokens != prompt.num_tokens:
            notes = [f"the engine counts {reply.prompt_tokens} tokens in a prompt of {prompt.num_tokens}"]
    patched = min(cached_tokens, sum(s.length for s in new if s.origin == "stored"))
    turned = min(cached_tokens - patched, sum(s.length for s in new if s.origin in ("canonical", "survivor")))
    return TurnReport(
        kept=cached_tokens - patched - turned,
        turned=turned,
        patched=patched,
        prefilled=prompt.num_tokens - cached_tokens,
        forwards=int(reply is not None),
        tokens_recomputed=0 if reply is None else prompt.num_tokens - cached_tokens,
        vision_encodes=0,  # the engine does not say
        guarantee=weakest(slot.guarantee for slot in window.slots),
        notes=tuple(notes),
        **fields,
    )


def engine_messages(shaped_history: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as an engine takes them, their pictures apart."""
    return tuple({**message, "content": _content(message.get("content"))} for message in shaped_history)


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    return [
        {"type": "text", "text": i["text"]} if kind_of(i) == "text" else {"type": "image"} for i in content
    ]
