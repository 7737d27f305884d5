"""`KameraWindow`: a context window that is a deque. Every operation is a cache edit."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kamera.backbones import Backbone, Chunk
from kamera.backbones.build import Content, Spoken
from kamera.errors import IncompatibleChunk, InvalidPermutation, WindowFull
from kamera.store import ChunkStore, Hit
from kamera.window.anchor import prefill_anchor
from kamera.window.certificate import Certificate
from kamera.window.certified import agree
from kamera.window.deque import Deque, Move
from kamera.window.forming import FormingRule, forming_of
from kamera.window.lookback import MIN_SCORE, candidates, check_cosine, chosen, note_duplicate
from kamera.window.losses import Losses
from kamera.window.orbit import form_orbit
from kamera.window.policy import Archive, OnLeave, PositionRule, ReusePolicy
from kamera.window.questions import Questions
from kamera.window.report import Report, SlotReport, Tally, counting
from kamera.window.serial import serial
from kamera.window.serving import Server
from kamera.window.slots import Facts, Slot
from kamera.window.state import indices
from kamera.window.trace import Trace


class KameraWindow(Questions):
    """The deque of chunks in front of a question.

    ``system`` is the system prompt (text, messages, token ids, or None for the template's own);
    ``max_tokens`` bounds anchor and chunks together: `append` and `recall` slide by themselves when a
    chunk would not fit, under the rule ``positions``.

    ``certificate`` (one, or its file) lets the backbone serve less than exact KV; without it one is
    looked for beside the store and in the user's directory, once, here. See `ReusePolicy.certified`.
    Raises CertificateMismatch or InvalidCertificate for a given one that does not serve.

    ``trace`` is a file to which each operation is written, ids and times only: `kamera plan` makes a
    plan of it.

    ``forming`` "background" factors and stores patches on a thread of its own while the window goes on;
    `flush` waits for them. What is served is the same either way.

    An operation succeeds whole or leaves the window as it was. Operations and questions that several
    threads ask of one window run one after another; windows and forks, which share what they have in
    common, run beside each other.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: ChunkStore,
        system: Spoken | None = None,
        *,
        max_tokens: int | None = None,
        policy: ReusePolicy | None = None,
        positions: PositionRule = "compact",
        certificate: Certificate | str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
        forming: FormingRule = "now",
    ) -> None:
        _check_rule(positions)
        self._lock = threading.RLock()
        _check_parts(backbone, store)
        self._trace = None if trace is None else Trace(trace)
        self._terms = agree(backbone, store, policy, certificate)
        anchor = prefill_anchor(backbone, system)
        if max_tokens is not None and anchor.length >= max_tokens:
            raise WindowFull(
                f"max_tokens={max_tokens} leaves no room behind the system prompt's {anchor.length} "
                "tokens: raise it"
            )
        self._server = Server(backbone, store, anchor, self._terms.served, forming_of(forming), Losses())
        self._deque = Deque(self._server, max_tokens, positions)
        self._state = self._deque.empty()
        self._family = weakref.WeakSet([self])

    # -- operations ----------------------------------------------------------------------------

    @serial
    def append(
        self, content: Content | Chunk, *, archive: Archive = "now", near_duplicate: float | None = None
    ) -> SlotReport:
        """Put a chunk at the tail; slide first when it would not fit.

        A chunk that is new to the store is encoded and prefilled in context; its canonical is
        archived with one more forward (``archive="later"`` puts that off until it leaves) and its
        patch harvested. A stored chunk does what `recall` does. With ``near_duplicate`` the notes name
        an archived chunk whose pictures look like these by that cosine or more (docs/search.md). Raises
        WindowFull for a chunk larger than the window, IncompatibleChunk for one of another backbone,
        and what `Backbone.chunk` raises.
        """
        if archive not in ("now", "later"):
            raise ValueError(f'archive {archive!r} is neither "now" nor "later"')
        if near_duplicate is not None:
            check_cosine("near_duplicate", near_duplicate)

        def arrive(tally: Tally) -> Move:
            chunk = content if isinstance(content, Chunk) else self.backbone.chunk(content)
            self._check_made_here(chunk)
            facts = self._server.archived(chunk.id)
            if facts is not None:
                move = self._deque.arrive(self._state, facts, tally)
            else:
                here = (r.facts for r in self._state.residents if r.facts.chunk_id == chunk.id)
                facts = next(here, None) or Facts(chunk.id, self.backbone.encode(chunk), chunk.label)
                move = self._deque.arrive_new(self._state, facts, tally, archive)
            if near_duplicate is not None:
                note_duplicate(self._server, facts, near_duplicate, tally)
            return move

        return self._perform_on_slot("append", arrive)

    @serial
    def recall(
        self,
        chunk_id: str | Slot | Chunk | None = None,
        *,
        like: Content | Chunk | None = None,
        min_score: float = MIN_SCORE,
        move: bool = False,
    ) -> SlotReport:
        """Rehydrate an archived chunk at the tail: no vision encode, no forward if a patch is stored.

        ``chunk_id`` is its id, a slot that holds or held it, or the chunk itself. One that is in view stays
        where it is, and the notes say so; ``move=True`` brings it to the tail, as `evict` and a recall do.
        ``like`` a picture, for one vision encode: of the chunks not in the window the one that looks
        most like it, if by a cosine of ``min_score``. Raises UnknownChunk, IncompatibleChunk or
        CorruptChunk when it cannot be had, StoreError when the store cannot be asked.
        """

        def arrive(tally: Tally) -> Move:
            found = chosen(self._server, self._state.residents, chunk_id, like, min_score, tally)
            ids = self._state.chunk_ids
            if found not in ids:
                return self._deque.arrive(self._state, self._server.known(found), tally)
            index = len(ids) - 1 - ids[::-1].index(found)
            here = self._state.residents[index]
            if move and index < len(ids) - 1:
                return self._deque.move_to_tail(self._state, index, tally)
            note = f"chunk {found[:12]} is in view at slot {index}, where it stays"
            tally.notes.append(note if move else f"{note}: move=True brings it to the tail")
            return Move(self._state, here)

        return self._perform_on_slot("recall", arrive)

    @serial
    def search(self, like: Content | Chunk, k: int = 5) -> list[Hit]:
        """The ``k`` archived chunks that look most like a picture: one vision encode, no forward."""
        self._check_backbone()
        return candidates(self._server, like, k)

    @serial
    def slide(self, n: int = 1, *, positions: PositionRule = "compact") -> SlotReport:
        """The ``n`` oldest chunks leave and the rest survive, with zero forwards.

        ``positions="compact"`` re-rotates the survivors to where a fresh window would have them;
        ``"keep"`` leaves them where they are and touches nothing. Under the policy minimum "exact"
        survivors are prefilled again instead.
        """
        _check_rule(positions)
        if not isinstance(n, int) or isinstance(n, bool):
            raise ValueError(f"cannot slide {n!r} chunks: give a whole number")
        if not len(self):
            raise ValueError("the window is empty, nothing can slide out: append or recall a chunk first")
        if not 1 <= n <= len(self):
            raise ValueError(f"cannot slide {n} chunks out of a window of {len(self)}")
        return self._perform_on_slot(
            "slide", lambda t: self._deque.leave(self._state, range(n), positions, t)
        )

    @serial
    def evict(self, slot: Slot | int, *, positions: PositionRule = "compact") -> SlotReport:
        """One chunk leaves, wherever it stands; it stays archived and can be recalled."""
        _check_rule(positions)
        index = self._state.index(slot)
        return self._perform_on_slot("evict", lambda t: self._deque.leave(self._state, [index], positions, t))

    @serial
    def reorder(self, permutation: Sequence[int]) -> Report:
        """Put the chunks in another order: ``permutation[i]`` is the present index of the i-th.

        Chunks behind an unchanged prefix stay as they are; the others take the patch stored for
        their new antecedents (in this order, or the orbit patch of the set when the policy admits
        it).
        """
        order = indices(permutation)
        if sorted(order) != list(range(len(self))):
            raise InvalidPermutation(
                f"{order} is no permutation of the window's {len(self)} slots: give each index once"
            )
        return self._perform("reorder", lambda t: self._deque.reorder(self._state, order, t))

    @serial
    def condition(self, slot: Slot | int, on: bool) -> SlotReport:
        """Switch a chunk to its clean canonical view, and back: exact both ways, zero forwards."""
        if not isinstance(on, bool):
            raise ValueError(f"on {on!r} is neither True nor False")
        index = self._state.index(slot)
        return self._perform_on_slot("condition", lambda _: self._deque.condition(self._state, index, on))

    @serial
    def insert(self, index: int, content: Content | Chunk, *, on_leave: OnLeave = "repair") -> Report:
        """Put a chunk before the slot at ``index``; those behind it follow as `arrange` says."""
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= len(self):
            raise ValueError(f"index {index!r} of a window of {len(self)}: give 0..{len(self)}")
        order = [*self.slots[:index], content, *self.slots[index:]]
        return self._rearrange("insert", order, on_leave)

    @serial
    def replace(self, slot: Slot | int, content: Content | Chunk, *, on_leave: OnLeave = "repair") -> Report:
        """Put a chunk in another's place, which leaves; those behind it follow as `arrange` says."""
        index = self._state.index(slot)
        order = [*self.slots[:index], content, *self.slots[index + 1 :]]
        return self._rearrange("replace", order, on_leave)

    @serial
    def arrange(self, order: Sequence[Slot | Content | Chunk], *, on_leave: OnLeave = "repair") -> Report:
        """Make the window hold these slots of its own and these new chunks, in this order.

        Slots that are not named leave. Chunks in front of the first change stay as they are. Behind it,
        ``on_leave`` "keep" keeps the KV of those that stay, turned to its new place: they are survivors, or
        ``near`` where a chunk came that they never saw. "repair" brings them as the policy says (a stored
        patch, else a forward), "exact" prefills them. Chunks are encoded once. Raises WindowFull, and what
        `append` raises.
        """
        return self._rearrange("arrange", order, on_leave)

    def _rearrange(self, operation: str, order: Sequence[Any], on_leave: OnLeave) -> Report:
        if on_leave not in ("keep", "repair", "exact"):
            raise ValueError(f"on_leave {on_leave!r} is none of keep, repair, exact")
        named = [s.number for s in order if isinstance(s, Slot)]
        if len(named) != len(set(named)):
            raise InvalidPermutation(f"{operation} names a slot twice: give each slot once")
        held = {r.number: r for r in self._state.residents}

        def arrange(tally: Tally) -> Move:
            wanted = [
                held[self._state.residents[self._state.index(item)].number]
                if isinstance(item, Slot)
                else self._facts(item)
                for item in order
            ]
            return self._deque.arrange(self._state, wanted, on_leave, tally)

        return self._perform(operation, arrange)

    def _facts(self, content: Content | Chunk) -> Facts:
        """A chunk ready to be prefilled: as archived, as it stands here, or encoded now."""
        chunk = content if isinstance(content, Chunk) else self.backbone.chunk(content)
        self._check_made_here(chunk)
        here = (r.facts for r in self._state.residents if r.facts.chunk_id == chunk.id)
        facts = next(here, None) or self._server.archived(chunk.id)
        return facts or Facts(chunk.id, self.backbone.encode(chunk), chunk.label)

    @serial
    def form_orbit(self, slot: Slot | int, *, samples: int | None = None, seed: int = 0) -> SlotReport:
        """Form and store the orbit patch of a chunk over orderings of what stands before it.

        A few that stand for all; ``samples`` asks for more, or fewer (`orbit.orderings`). The window
        itself does not change.
        """
        index = self._state.index(slot)
        residents = self._state.residents

        def form(_: Tally) -> Move:
            before = [r.facts for r in residents[:index]]
            form_orbit(self._server, residents[index].facts, before, samples=samples, seed=seed)
            return Move(self._state, residents[index])

        return self._perform_on_slot("form_orbit", form)

    @serial
    def fork(self) -> KameraWindow:
        """A branch: the same chunks, nothing copied until one of the two changes its own."""
        branch = copy.copy(self)
        branch._lock = threading.RLock()
        branch._deque = self._deque.fork()
        self._family.add(branch)
        return branch

    # -- persistence ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until patches formed in the background are stored; raises what kept one from it."""
        self._server.forming.flush()

    @serial
    def save(self, path: str | Path) -> None:
        """Write the window to a directory of its own, bit for bit, in place of the window saved there.

        In one step: whoever loads meanwhile gets the old window or the new one, and of saves that meet the
        last one stays. Raises StoreError when the operating system refuses, or the directory holds something
        else; what was there stays then.
        """
        from kamera.window.persist import save_window

        with self._server.losses.borne("patches formed in the background were not kept"):
            self.flush()
        save_window(Path(path), self._server, self._deque, self._state, self._terms.asked)

    @classmethod
    def load(
        cls,
        path: str | Path,
        backbone: Backbone,
        store: ChunkStore,
        *,
        certificate: Certificate | str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
        forming: FormingRule = "now",
    ) -> KameraWindow:
        """Bring a saved window back, bit for bit.

        Where its policy needs a certificate and there is none any more, chunks that were less than
        exact are prefilled again. Raises IncompatibleChunk for another backbone, CorruptChunk for a
        damaged file, and for ``certificate`` what the constructor raises. ``trace`` and ``forming`` as there.
        """
        from kamera.window.persist import load_window

        _check_parts(backbone, store)
        window = cls.__new__(cls)
        window._lock = threading.RLock()
        loaded = load_window(Path(path), backbone, store, certificate, forming)
        window._terms, window._server, window._deque, window._state = loaded
        window._trace = None if trace is None else Trace(trace)
        window._family = weakref.WeakSet([window])
        return window

    # -- inside --------------------------------------------------------------------------------

    def _perform(self, operation: str, edit: Callable[[Tally], Move]) -> Report:
        """One operation, from the present state to the next; an error leaves the present one."""
        self._check_backbone()
        with counting(self.backbone) as tally, self._server.losses.told_to(tally):
            move = edit(tally)
            self._deque.hold(move.state, tally)
        old = self.slots
        before = {s.number: s for s in old}
        self._state = move.state
        after = self.slots
        if self._trace is not None:
            self._trace.record(operation, self.anchor.digest, old, after)
        evicted = tuple(before[r.number] for r in move.left)
        slot = next((s for s in after if move.arrived and s.number == move.arrived.number), None)
        return tally.report(operation, slot or (evicted[-1] if evicted else None), after, evicted)

    def _perform_on_slot(self, operation: str, edit: Callable[[Tally], Move]) -> SlotReport:
        """`_perform`, of an edit by which a chunk arrives or leaves."""
        report = self._perform(operation, edit)
        assert isinstance(report, SlotReport), f"{operation} concerns a slot"
        return report

    def _check_made_here(self, chunk: Chunk) -> None:
        if chunk.fingerprint != self._server.context.fingerprint:
            raise IncompatibleChunk(
                f"chunk {chunk.id[:12]} was built by backbone {chunk.fingerprint[:12]}, this window's is "
                f"{self._server.context.fingerprint[:12]}: build it with window.backbone.chunk()"
            )


def _check_rule(rule: str) -> None:
    if rule not in ("compact", "keep"):
        raise ValueError(f'positions {rule!r} is neither "compact" nor "keep"')


def _check_parts(backbone: object, store: object) -> None:
    if not isinstance(backbone, Backbone):
        raise ValueError(f"{backbone!r} is no Backbone: load one with Backbone.from_pretrained")
    if not isinstance(store, ChunkStore):
        raise ValueError(f"{store!r} is no ChunkStore: open one with ChunkStore.open")
