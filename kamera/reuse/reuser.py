"""`Reuser`: a prompt becomes a plan of stored and new segments; run, it leaves a window with the prompt.

What came before is looked for in an index of one's own, or in that of a store. A rendered conversation is cut
where parts of its texts came before, so that these are segments again.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from kamera import forks
from kamera.content import Chunk, Conversations, Extent, LandmarkReader, Message, Rendered, common_prefix
from kamera.engines import Account, Engine, HasEngine, Spent, Usage
from kamera.errors import EmptyChunk, ProcessorRequired, UnidentifiedMedia
from kamera.reuse.admission import Admission, admissions_after_run, admissions_of
from kamera.reuse.index import ContentIndex, Found, Seen
from kamera.reuse.prompt import DEFAULT_RULE, RULES, CutRule, Media, Prompt
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy, policy_of
from kamera.window import Arrange, KameraWindow, Plan, Report, former_of, sequence_of

LIMIT = 256 * 2**20
"""Bytes of an index."""

_guard = forks.Lock()
_discoveries: weakref.WeakKeyDictionary[ChunkStore, dict[str, Discovery]] = weakref.WeakKeyDictionary()


class Discovery:
    """Finds prompts' parts in earlier ones, and remembers how each was cut. Threads may share one."""

    def __init__(self, rule: CutRule = RULES[DEFAULT_RULE]) -> None:
        self._lock = forks.Lock("the index of a store's prompts")
        self._index = ContentIndex(rule, limit=LIMIT)

    def find(self, prompt: Prompt, edges: Sequence[int]) -> Found:
        """As `ContentIndex.find`."""
        with self._lock:
            return self._index.find(prompt, edges)

    def add(self, prompt: Prompt, cuts: Sequence[int]) -> None:
        """As `ContentIndex.add`."""
        with self._lock:
            self._index.add(prompt, cuts)


def discovery_of(backbone: Engine, store: ChunkStore) -> Discovery:
    """The one discovery of the conversations on a store: a store has one tenant."""
    with _guard:
        return _discoveries.setdefault(store, {}).setdefault(backbone.fingerprint, Discovery())


class Recut(NamedTuple):
    """A conversation as it is cut. ``prompt`` is its stable part as an index sees it, between ``cuts``.

    ``again`` are the extents that came before behind other tokens.
    """

    rendered: Rendered
    prompt: Prompt
    again: frozenset[Extent]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The borders of the segments, both ends among them."""
        return (0, *[segment.stop for segment in self.rendered.segments])


def recut(
    rendered: Rendered, discovery: Discovery, first: int, known: Collection[str] = frozenset()
) -> Recut:
    """The conversation with what came before as segments of their own, from token ``first`` on.

    No segment goes across the edge of a text. Texts whose ids are ``known``, and media, stay as they are.
    """
    texts = [s for s in rendered.segments if s.media is None and s.start >= first]
    own = [(s.start, s.stop) for s in texts if s.id in known]
    edges = {first, *(edge for extent in (*rendered.texts, *own) for edge in extent)}
    media = [Media(s.start, s.stop, s.media) for s in rendered.segments if s.media is not None]
    prompt = Prompt.of(rendered.ids[: rendered.stable].numpy(), media=media)
    matches = discovery.find(prompt, sorted(edges))
    starts = [start for start, _ in own]

    def free(start: int) -> bool:
        at = bisect_right(starts, start)
        return start >= first and not (at and start < own[at - 1][1])

    extents = sorted([*own, *[extent for extent in matches.kept if free(extent[0])]])
    hits = frozenset([(start, stop) for start, stop, *_ in matches.hits])
    return Recut(rendered.recut(extents), prompt, hits)


@dataclass(frozen=True, eq=False)
class Pieces:
    """A ``prompt`` between ``cuts``: the sink up to ``sink``, the ``chunks`` after it, a ``question``.

    ``ids`` are its tokens, int64 ``[tokens]``. ``hit_ids`` are ids of chunks that came before elsewhere.
    """

    prompt: Prompt
    cuts: tuple[int, ...]
    ids: torch.Tensor
    sink: int
    chunks: tuple[Chunk, ...]
    question: int
    hit_ids: tuple[str, ...] = ()


def pieces_of_ids(backbone: Engine, prompt: Prompt, discovery: Discovery, sink: int) -> Pieces:
    """Token ids cut where parts of them came before, the rest by the rule; the last segment is the question.

    Raises EmptyChunk without tokens, `ValueError` for ids outside the vocabulary or for media, whose pixels
    a `Prompt` does not have; UnidentifiedMedia for placeholders of media.
    """
    if prompt.media:
        raise ValueError("a Prompt has no pixels, only digests of media: give the conversation's messages")
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    placeholder = np.isin(prompt.ids, backbone.builder.vision_tokens)
    if placeholder.any():
        place = int(placeholder.argmax())
        raise UnidentifiedMedia(
            f"token {int(ids[place])} at {place} is a placeholder of media, and token ids have no pixels: "
            "give the conversation's messages"
        )
    sink = _sink(sink, len(prompt))
    backbone.chunk_from_tensors(ids)  # raises for unknown ids
    matches = discovery.find(prompt, (sink,))
    cuts, question = matches.cuts, matches.cuts[-2]
    inner = [*itertools.pairwise(cuts[cuts.index(sink) : -1])]
    chunks = [backbone.chunk_from_tensors(ids[a:b]) for a, b in inner]
    hit_ids = _seen_ids({(start, stop) for start, stop, *_ in matches.hits}, inner, chunks)
    return Pieces(prompt, cuts, ids, sink, tuple(chunks), question, hit_ids)


def pieces_of_messages(
    backbone: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    discovery: Discovery,
    sink: int,
) -> Pieces:
    """A conversation cut where parts of its turns came before, the rest into its rendered segments.

    The generation prompt is the question. Raises ProcessorRequired without a chat template, EmptyChunk
    without tokens, and the errors of `Conversations.render`.
    """
    if backbone.processor is None:
        raise ProcessorRequired("messages need the model's chat template: give the backbone its processor")
    limits = backbone.builder.limits
    conversations = Conversations(backbone.processor, most=backbone.limits.trained, limits=limits)
    rendered = conversations.render(messages, tools=tools)
    total = rendered.num_tokens
    first = next((s.start for s in rendered.segments if s.media is not None), total)
    sink = min(_sink(sink, total), first)
    division = recut(rendered, discovery, sink)
    rendered = division.rendered
    whole = rendered.stable < total  # else the template has no generation prompt
    question = max(sink, rendered.stable if whole else rendered.segments[-1].start)
    cuts = sorted({*division.cuts, sink})
    inner = [*itertools.pairwise(c for c in cuts if sink <= c <= question)]
    chunks = [_chunk(backbone, rendered, a, b) for a, b in inner]
    hit_ids = _seen_ids(division.again, inner, chunks)
    return Pieces(division.prompt, tuple(cuts), rendered.ids, sink, tuple(chunks), question, hit_ids)


def _seen_ids(hits: Collection[Extent], inner: Sequence[Extent], chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """The ids of the chunks that came before behind other tokens."""
    return tuple(dict.fromkeys(c.id for c, extent in zip(chunks, inner, strict=True) if extent in hits))


def _chunk(backbone: Engine, rendered: Rendered, start: int, stop: int) -> Chunk:
    segment = next(s for s in reversed(rendered.segments) if s.start <= start)
    names = set(backbone.builder.accepted)
    inputs = {name: value for name, value in rendered.inputs(segment).items() if name in names}
    return backbone.chunk_from_tensors(rendered.ids[start:stop], label=segment.role, **inputs)


def _sink(sink: int, total: int) -> int:
    if not total:
        raise EmptyChunk("the prompt has no tokens: ask something")
    return min(sink, total - 1)


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
    def cost(self) -> Spent:
        """Cost of `run`; the question is not in it."""
        return self._plan.cost

    @property
    def later(self) -> Spent:
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
