"""The identity of an engine as objects bear it: fingerprints, and what the model answers to the probe."""

from __future__ import annotations

import logging
import weakref
from typing import NamedTuple

from kamera import forks
from kamera.engines import FEATURES, Answers, Engine
from kamera.errors import IncompatibleChunk, KameraError, UnsupportedBackbone
from kamera.patches.later import Worth, later_of
from kamera.store import Context, Unasked, encoding_context, probe_text

EVERY = 64
"""Operations on a backbone after which it is asked the probe again, as later work; after twice as many an
operation waits for the answers."""

logger = logging.getLogger(__name__)


class ProbeSchedule:
    """When the model of one backbone is asked the probe, and its last answers. Thread-safe.

    It is asked within a call if something has moved in it, if later work found it changed, and if later work
    has not come to it for long; else as later work, which the accounts of the call bear.
    """

    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._answers: tuple[str, Answers] | None = None  # and the fingerprint that they are of
        self._moves: int | None = None
        self._calls = 0
        self._pending = False
        self._doubted = False

    def answers(self, backbone: Engine, fingerprint: str) -> Answers:
        """What the model of this fingerprint answers: asked now, unless that is known.

        Raises ComputationChanged, and IncompatibleChunk if the fingerprint is another by now.
        """
        if self._answers is None or self._answers[0] != fingerprint:
            self.ask(backbone)
        if self._answers is None or self._answers[0] != fingerprint:
            raise IncompatibleChunk(
                f"the model is no longer backbone {fingerprint[:12]}, whose KV this is: undo what changed "
                "it, or make a new window"
            )
        return self._answers[1]

    def ask(self, backbone: Engine) -> None:
        """Ask the model now. Raises ComputationChanged; then the next operation asks again."""
        fingerprint, identity = backbone.fingerprint, backbone.identity
        try:
            answers = identity.answers()
        except BaseException:
            self._doubted = True
            raise
        if backbone.fingerprint != fingerprint:  # it changed meanwhile, or the probe saw what no look had
            self.ask(backbone)
            return
        with self._lock:
            self._answers, self._moves = (fingerprint, answers), identity.moves
            self._calls, self._pending, self._doubted = 0, False, False

    def begin(self, backbone: Engine) -> None:
        """A new window is made: ask now if something has moved or is doubted, else as later work."""
        _ = backbone.fingerprint  # a look: it sees what has moved
        if self._moves is None:
            self._moves = backbone.identity.moves
        if self._doubted or backbone.identity.moves != self._moves:
            self.ask(backbone)
        else:
            self._ask_later(backbone)

    def check(self, backbone: Engine) -> bool:
        """An operation: ask if that is due. True if the model was asked now."""
        with self._lock:
            self._calls += 1
            calls, pending = self._calls, self._pending
        if self._doubted or backbone.identity.moves != self._moves or calls >= 2 * EVERY:
            self.ask(backbone)
            return True
        if calls >= EVERY and not pending:
            self._ask_later(backbone)
        return False

    def _ask_later(self, backbone: Engine) -> None:
        engine = weakref.ref(backbone)

        def ask() -> None:
            there = engine()
            if there is None:
                return
            try:
                self.ask(there)
            except (KameraError, RuntimeError) as error:  # the next operation asks, and is refused
                logger.error("a probe asked as later work: %s", error)

        def dropped(why: str) -> None:
            self._doubted = True
            logger.warning("the probe was not asked, the next operation waits for it: %s", why)

        self._pending = True
        later_of(backbone).add(ask, Worth.PROBE, dropped=dropped)


_schedules: weakref.WeakKeyDictionary[Engine, ProbeSchedule] = weakref.WeakKeyDictionary()
_making = forks.Lock()


def probe_schedule_of(backbone: Engine) -> ProbeSchedule:
    """When the model of a backbone is asked: one for all its windows in this process."""
    with _making:
        return _schedules.setdefault(backbone, ProbeSchedule())


class StoredIdentity(NamedTuple):
    """Fingerprints of a model and of its vision part, and what each answers to the probe (`probe_text`)."""

    fingerprint: str
    vision: str
    probe: str | Unasked
    vision_probe: str | Unasked

    def context(self, anchor: str, tenant: str, kv: str = "as-is") -> Context:
        """The context of KV behind ``anchor``."""
        return Context(self.fingerprint, anchor, tenant, kv, self.probe)

    def encoding_context(self, tenant: str) -> Context:
        """The context of encodings."""
        return encoding_context(self.vision, tenant, self.vision_probe)

    def check(self, backbone: Engine, *, ask: bool = False) -> None:
        """Raise IncompatibleChunk unless the model is the one that computed the store's KV.

        With ``ask`` the model is asked the probe if that is due (`ProbeSchedule`); ComputationChanged if it
        answers otherwise than at first.
        """
        same = backbone.fingerprint == self.fingerprint
        # the probe may see more than the witness
        if same and ask and probe_schedule_of(backbone).check(backbone):
            same = backbone.fingerprint == self.fingerprint
        if not same:
            raise IncompatibleChunk(
                "the backbone's weights have changed since this window was made, or its code, settings, "
                "hooks or autocast: its KV is stale; undo that, or make a new window"
            )


def identify(backbone: Engine, *, later: bool = False) -> StoredIdentity:
    """Who a model is. It is asked the probe, before anything stored is looked up for it.

    ``later``: before anything stored is served or kept for it. Where its answers are known and nothing has
    moved in it, it is asked again as later work. Raises ComputationChanged, and UnsupportedBackbone for a
    model of which no KV can be used again.
    """
    if backbone.facts.no_reuse:
        raise UnsupportedBackbone(backbone.facts.no_reuse)
    schedule = probe_schedule_of(backbone)
    if later:
        schedule.begin(backbone)
    else:
        schedule.ask(backbone)
    fingerprint, vision = backbone.fingerprint, backbone.identity.vision()  # the probe may have seen more

    def text(of_features: bool) -> str:
        told = schedule.answers(backbone, fingerprint)
        some = {name: answer for name, answer in told.items() if (name == FEATURES) is of_features}
        return probe_text(some, backbone.identity.tolerance)

    return StoredIdentity(fingerprint, vision, Unasked(lambda: text(False)), Unasked(lambda: text(True)))
