"""`Reuser`: a prompt becomes a plan of stored and new segments; run, it leaves a window with the prompt."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from kamera.content import Chunk, LandmarkReader, Message, common_prefix
from kamera.engines import Account, HasEngine, Usage
from kamera.errors import ProcessorRequired
from kamera.reuse.admission import Admission, admissions_after_run, admissions_of
from kamera.reuse.discovery import Discovery
from kamera.reuse.pieces import Pieces, pieces_of_ids, pieces_of_messages
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import DEFAULT_RULE, RULES, CutRule
from kamera.reuse.seen import Seen
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy, policy_of
from kamera.window import (
    Arrange,
    Cost,
    KameraWindow,
    Plan,
    Report,
    former_of,
    sequence_of,
)

SINK = 4
"""First tokens of every prompt that are never spliced: attention sinks."""


@dataclass(frozen=True, eq=False)
class Reused:
    """A prompt in a window: ``window.generate(question)`` answers it.

    ``question`` are its last tokens, int64 ``[tokens]``, which run with the answer. ``admissions`` and
    ``report`` tell the tier of each segment and the work that was done.
    """

    window: KameraWindow
    question: torch.Tensor
    admissions: tuple[Admission, ...]
    report: Report


class ReusePlan:
    """A prompt's segments with tier and reason, and the cost of `run`, before anything has run.

    ``prefix`` tokens stay as an earlier prompt left them. ``question`` are the last tokens of the prompt.
    """

    def __init__(self, reuser: Reuser, window: KameraWindow, plan: Plan, prefix: int, pieces: Pieces) -> None:
        self.prefix = prefix
        self.question = pieces.ids[pieces.question :]
        self.admissions: tuple[Admission, ...] = admissions_of(window, plan, pieces.hit_ids)
        """The segments behind the sink and before the question, in order."""
        self._reuser = reuser
        self._window = window
        self._plan = plan
        self._pieces = pieces
        self._has_run = False

    @property
    def cost(self) -> Cost:
        """Cost of `run`; the question is not in it."""
        return self._plan.cost

    @property
    def later(self) -> Cost:
        """Cost of what `run` leaves for background work; audits are not in it."""
        return self._plan.later

    def run(self) -> Reused:
        """Prefill misses, place hits; new segments are stored as the policy says.

        The window is the caller's from then on, so a plan runs once. Raises `ValueError` for a second time,
        also after an error.
        """
        if self._has_run:
            raise ValueError("this plan has run: prepare the prompt again")
        self._has_run = True
        window = self._window
        self._reuser._discovery.add(self._pieces.prompt, self._pieces.cuts)
        with self._reuser._account.count_now(self._reuser.backbone):
            report = window.run(self._plan)
        self._reuser.keep_fork(window)
        admissions = admissions_after_run(self.admissions, self._plan, window.slots)
        return Reused(window, self.question, admissions, report)


class Reuser:
    """Finds the stored segments of prompts and serves them through windows. One thread at a time.

    The first ``sink`` tokens of a prompt are its window's anchor: never spliced, and equal in all prompts of
    one template, so that prompts share what comes after them. What came before, at whatever place, is cut out
    as it was (`ContentIndex`); the rest of a conversation is cut into its rendered segments, that of token
    ids by ``rule``. The last segment is the question.

    ``policy`` is that of the windows. The last ``held`` windows are kept: the next
    prompt starts from the one with which it has the longest prefix in common.

    Raises `ValueError` for a ``sink`` below 1 or ``held`` below 0.
    """

    def __init__(
        self,
        backbone: HasEngine,
        store: ChunkStore,
        policy: ReusePolicy | None = None,
        *,
        rule: CutRule = RULES[DEFAULT_RULE],
        sink: int = SINK,
        max_tokens: int | None = None,
        held: int = 8,
    ) -> None:
        if sink < 1 or held < 0:
            raise ValueError(f"sink={sink}, held={held}: keep 1 token and 0 windows or more")
        self.backbone = backbone.engine
        self.store = store
        self.policy = policy_of(policy)
        self.sink = sink
        self._max_tokens = max_tokens
        self._most = held
        self._reader: LandmarkReader | None = None
        self._texts = Seen()
        self._discovery = Discovery(rule)
        self._account = Account()
        self._windows: OrderedDict[tuple[tuple[int, ...], tuple[str, ...]], _Held] = OrderedDict()

    def prepare(
        self,
        prompt: Sequence[Message] | torch.Tensor | Sequence[int] | Prompt,
        *,
        tools: Sequence[Any] | None = None,
    ) -> ReusePlan:
        """The plan for a conversation, for token ids ``[tokens]`` (used as given), or for a `Prompt` of text.

        Token ids are cut where messages start, if the backbone's chat template shows that (`anchors_of`).
        Runs nothing but the forward of an unseen sink. Raises EmptyChunk for a prompt without tokens,
        ProcessorRequired for messages without a chat template, `ValueError` for ids outside the vocabulary or
        a `Prompt` with media, UnidentifiedMedia for ids of placeholders, whose pixels are missing, and the
        errors of `Conversations.render` and `KameraWindow.plan`.
        """
        with self._account.count_now(self.backbone):
            return self._prepare(prompt, tools)

    def usage(self) -> Usage:
        """The model work of `prepare` and of `ReusePlan.run`, now and later; after the window's `flush` equal
        to hooks.

        What the window of a `Reused` does from then on is on the window's own account.
        """
        return self._account.usage

    def keep_fork(self, window: KameraWindow) -> None:
        """Keep a fork of a window for later prompts that begin as it does; the oldest goes.

        The window itself stays the caller's: what happens in it later reaches no prompt.
        """
        fork = window.fork()
        anchor = tuple(former_of(fork).anchor.input_ids.tolist())
        name = (anchor, tuple(slot.chunk_id for slot in fork.slots))
        self._windows[name] = _Held(fork, sequence_of(fork).input_ids)
        self._windows.move_to_end(name)
        while len(self._windows) > max(1, self._most):
            self._windows.popitem(last=False)

    # -- inside --------------------------------------------------------------------------------

    def _prepare(
        self, prompt: Sequence[Message] | torch.Tensor | Sequence[int] | Prompt, tools: Sequence[Any] | None
    ) -> ReusePlan:
        if not isinstance(prompt, Prompt) and _are_messages(prompt):
            pieces = pieces_of_messages(
                self.backbone, cast(Sequence[Message], prompt), tools, self._discovery, self.sink
            )
        else:
            id_prompt = prompt if isinstance(prompt, Prompt) else self._anchor(torch.as_tensor(prompt))
            pieces = pieces_of_ids(self.backbone, id_prompt, self._discovery, self.sink)
        window, equal_count = self._nearest(pieces.ids[: pieces.sink], pieces.chunks)
        prefix = pieces.sink + sum(slot.length for slot in window.slots[:equal_count])
        order = (*window.slots[:equal_count], *pieces.chunks[equal_count:])
        peers = self._texts.texts_with_head(pieces.chunks)
        self._texts.add(pieces.chunks)
        recurring = pieces.hit_ids if window.policy.moves else ()
        plan = window.plan(Arrange(order, "repair", peers, archive=False, recurring=recurring))
        return ReusePlan(self, window, plan, prefix, pieces)

    def _anchor(self, ids: torch.Tensor) -> Prompt:
        if self._reader is None and self.backbone.processor is not None:
            with contextlib.suppress(ProcessorRequired):  # without a template there is no message to find
                self._reader = LandmarkReader(self.backbone.processor)
        borders = () if self._reader is None or ids.dim() != 1 else self._reader.of(ids.tolist()).borders
        return Prompt.of(ids.numpy(), anchors=borders)

    def _nearest(self, anchor: torch.Tensor, chunks: Sequence[Chunk]) -> tuple[KameraWindow, int]:
        """A fork of the held window with the longest equal prefix, else a new one; and its equal segments."""
        best: tuple[int, int, KameraWindow] | None = None
        for (start, names), entry in self._windows.items():
            if start == tuple(anchor.tolist()):
                segments, tokens = entry.common(names, chunks)
                if best is None or tokens >= best[0]:
                    best = tokens, segments, entry.window
        if best is not None:
            return best[2].fork(), best[1]
        fresh = KameraWindow(
            self.backbone, self.store, anchor, max_tokens=self._max_tokens, policy=self.policy
        )
        self.keep_fork(fresh)
        return fresh.fork(), 0


class _Held(NamedTuple):
    """A window that nobody else has, and its tokens."""

    window: KameraWindow
    ids: torch.Tensor

    def common(self, names: Sequence[str], chunks: Sequence[Chunk]) -> tuple[int, int]:
        """Equal leading segments, and tokens: those of the segments and of the next one's equal head."""
        count = common_prefix(names, [chunk.id for chunk in chunks])
        tokens = sum(chunk.num_tokens for chunk in chunks[:count])
        if count < min(len(names), len(chunks)) and not chunks[count].has_media:
            slot, ids = self.window.slots[count], chunks[count].input_ids
            tokens += common_prefix(ids.tolist(), self.ids[slot.start : slot.start + slot.length].tolist())
        return count, tokens


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
