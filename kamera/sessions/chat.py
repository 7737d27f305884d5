"""`ChatSession`: a conversation in front of a window. Every change of its history is a cache edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from kamera.backbones import Backbone, Chunk
from kamera.content import Conversations, Message, Rendered, Segment
from kamera.content.template import media_items
from kamera.edits import Difference, EditPolicy, difference, edited
from kamera.errors import ProcessorRequired
from kamera.sessions.tool_calls import tool_calls
from kamera.sessions.turn import Turn, TurnReport, turn_report
from kamera.store import ChunkStore
from kamera.window import KameraWindow, ReusePolicy, Slot
from kamera.window.policy import OnLeave

SessionMode = Literal["amortize", "repair", "forget", "auto"]
_ON_LEAVE: dict[str, OnLeave] = {"amortize": "keep", "repair": "repair", "forget": "exact"}


class ChatSession:
    """A conversation whose history may be edited between turns, by its owner or by an ``edit_policy``.

    The leading system messages (and what the template adds in front) are the window's anchor; every other
    segment of the rendered conversation is a chunk. A turn compares its prompt with the one before:
    segments that are still there are kept or turned, what is new is prefilled. ``mode`` says what becomes
    of segments behind an edit: ``"amortize"`` keeps what they absorbed from what has gone, ``"repair"``
    patches them to what stands there now, ``"forget"`` prefills them (equal to a run that never saw it),
    ``"auto"`` takes the cheapest that the reuse policy admits.

    After an error the session is as it was. It is used from one thread at a time. Raises
    ProcessorRequired for a backbone without a processor or chat template.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: ChunkStore,
        *,
        tools: Sequence[Any] | None = None,
        mode: SessionMode = "auto",
        policy: ReusePolicy | None = None,
        edit_policy: EditPolicy | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if mode not in get_args(SessionMode):
            raise ValueError(f"mode {mode!r} is none of {', '.join(get_args(SessionMode))}")
        if backbone.processor is None:
            raise ProcessorRequired(
                "a conversation needs the model's chat template: give the backbone its processor "
                "(Backbone(model, processor))"
            )
        self.backbone = backbone
        self.store = store
        self.tools = tools
        self.mode: SessionMode = mode
        self._conversations = Conversations(backbone.processor)
        self._policy = policy
        self._edit_policy = edit_policy
        self._max_tokens = max_tokens
        self._messages: tuple[dict[str, Any], ...] = ()
        self._prompt: Rendered | None = None
        self._window: KameraWindow | None = None
        self._turn = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, answers included, before any edit policy."""
        return [dict(message) for message in self._messages]

    @property
    def prompt_ids(self) -> torch.Tensor:
        """Tokens of the last prompt, int64 ``[tokens]``: those of the chat template over the conversation."""
        return torch.empty(0, dtype=torch.int64) if self._prompt is None else self._prompt.ids

    @property
    def window(self) -> KameraWindow | None:
        """The window that holds the last prompt; None before the first turn."""
        return self._window

    def send(
        self, messages: str | Message | Sequence[Message], *, append: bool = False, **options: Any
    ) -> Turn:
        """Answer the conversation; the answer joins the history.

        ``messages`` is the whole history as the client has it now, edited or not. Text and a single message
        are what is new; with ``append`` a list is, too. ``options`` (max_new_tokens, do_sample, stop_strings,
        streamer, …) go to ``generate`` of transformers. Raises EditPolicyFailed, and what
        `Conversations.render` and the window raise.
        """
        history = self._history(messages, append)
        report, window, prompt = self._show(history)
        if "stop_strings" in options:
            options.setdefault("tokenizer", getattr(self.backbone.processor, "tokenizer", None))
        text = window.generate(prompt.ids[_question(prompt) :], **options)
        calls = tool_calls(text)
        self._messages = (*history, {"role": "assistant", "content": text})
        self._turn += 1
        return Turn(text, calls, report)

    def next_token_logits(
        self, messages: str | Message | Sequence[Message], *, append: bool = False
    ) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; nothing joins the history."""
        _, window, prompt = self._show(self._history(messages, append))
        return window.next_token_logits(prompt.ids[_question(prompt) :])

    # -- inside --------------------------------------------------------------------------------

    def _history(
        self, messages: str | Message | Sequence[Message], append: bool
    ) -> tuple[dict[str, Any], ...]:
        if isinstance(messages, str):
            return (*self._messages, {"role": "user", "content": messages})
        if isinstance(messages, Mapping):
            return (*self._messages, dict(messages))
        given = tuple(dict(message) for message in messages)
        return (*self._messages, *given) if append else given

    def _show(self, history: Sequence[Message]) -> tuple[TurnReport, KameraWindow, Rendered]:
        """Make the window hold the prompt of ``history``; on an error it holds the one before."""
        shaped: list[Message] = list(history)
        if self._edit_policy is not None:
            shaped = [*edited(self._edit_policy, shaped, self._turn)]
        prompt = self._conversations.render(shaped, tools=self.tools)
        first = _anchor_segments(prompt)
        fresh = self._window is None or self._anchored(prompt, first)
        window = self._opened(prompt, first) if fresh else self._window
        assert window is not None
        before = window.slots
        media = {m.digest: m.inputs for m in map(self._conversations.media, media_items(shaped))}
        order: list[Slot | Chunk] = []
        slots = {} if fresh else self._standing(prompt)
        for index, segment in enumerate(prompt.segments):
            if index < first or segment.start >= _question(prompt):
                continue
            order.append(slots[index] if index in slots else self._chunk(prompt, segment, media))
        report = window.arrange(order, on_leave=self._on_leave(window))
        self._window, self._prompt = window, prompt
        anchor = 0 if fresh else window.anchor.length
        total = turn_report(before, report, anchor, prompt.num_tokens, window.guarantee)
        return total, window, prompt

    def _standing(self, prompt: Rendered) -> dict[int, Slot]:
        """Which slot of the window holds which segment of the new prompt."""
        assert self._prompt is not None and self._window is not None
        change: Difference = difference(self._prompt, prompt)
        first = _anchor_segments(self._prompt)
        slots = self._window.slots
        held = range(first, first + len(slots))
        return {j: slots[i - first] for i, j in (*change.kept, *change.moved) if i in held}

    def _anchored(self, prompt: Rendered, first: int) -> bool:
        """Whether the new prompt begins otherwise than the window."""
        assert self._prompt is not None
        old = self._prompt.segment_ids()[: _anchor_segments(self._prompt)]
        return old != prompt.segment_ids()[:first]

    def _opened(self, prompt: Rendered, first: int) -> KameraWindow:
        stop = prompt.segments[first - 1].stop if first else 0
        return KameraWindow(
            self.backbone,
            self.store,
            prompt.ids[:stop],
            max_tokens=self._max_tokens,
            policy=self._policy,
        )

    def _chunk(
        self, prompt: Rendered, segment: Segment, media: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> Chunk:
        inputs = {} if segment.media is None else dict(media[segment.media])
        accepted = set(self.backbone.builder.accepted)
        given = {name: value for name, value in inputs.items() if name in accepted}
        return self.backbone.chunk_from_tensors(prompt.tokens(segment), label=segment.role, **given)

    def _on_leave(self, window: KameraWindow) -> OnLeave:
        if self.mode != "auto":
            return _ON_LEAVE[self.mode]
        minimum = window.policy.minimum
        return "exact" if minimum == "exact" else "repair" if minimum in ("patched", "orbit") else "keep"


def _question(prompt: Rendered) -> int:
    """Where the tokens begin that are asked behind the window: at the generation prompt.

    Where the template writes none, the last segment is asked.
    """
    return prompt.stable if prompt.stable < prompt.num_tokens else prompt.segments[-1].start


def _anchor_segments(prompt: Rendered) -> int:
    """How many segments in front are the template's own or a system message's text."""
    count = 0
    for segment in prompt.segments:
        if segment.role not in ("", "system", "developer") or segment.media is not None:
            break
        count += 1
    return count
