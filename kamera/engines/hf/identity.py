"""The identity of a live model: its fingerprint, brought up to date at every access."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kamera import forks
from kamera.engines.hf import fingerprint as digests
from kamera.engines.hf import probe
from kamera.engines.hf.model import Model
from kamera.engines.hf.probing import Prober, tolerance
from kamera.engines.hf.witness import Look, Witness
from kamera.engines.values import Answers
from kamera.errors import ComputationChanged
from kamera.ops import digest

logger = logging.getLogger(__name__)

_TRIES = 4
"""How often a model is asked that changes meanwhile."""

_steady: ContextVar[dict[ModelIdentity, tuple[str, str]] | None] = ContextVar("kamera_steady", default=None)
"""Both fingerprints of the models that this thread has looked at since its operation began."""


class ModelIdentity:
    """The fingerprints of a live model and its processor, and its answers. Safe to use from several threads.

    Unchanged parts are not digested again: tensors, settings and processor each have a digest of their own.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._decoder, self._processor = model.model, model.decoder, model.processor
        self._layout = model.layout
        self._facts = self._read_facts()
        self._lock = forks.Lock()
        self._witness = Witness(self._model, self._decoder)
        self._prober = Prober(model)
        self._devices = tuple(sorted({p.device.type for p in self._model.parameters()}))
        self._last_look: tuple[Look, bytes] | None = None
        self._both = ("", "")
        self._has_other_facts = False
        self._tensors: tuple[Any, digests.Two] | None = None
        self._settings: tuple[bytes, str] | None = None
        self._words: tuple[bytes, str] | None = None
        self._of_files: tuple[str, str] | None = None  # the digest of the model as loaded, and its files' own
        if self.unread:
            logger.warning(
                "something in this %s cannot be digested (%s): its fingerprint is that of this Backbone "
                "alone, and nothing it stores is served to another",
                model.facts.kind,
                "; ".join(self.unread[:3]),
            )
        self.moves = 0
        """Number of changes seen in the model, including those that left the fingerprint as it was."""
        self.tolerance = tolerance(model)

    def fingerprint(self) -> str:
        """As `Engine.fingerprint`, of the model as this thread would run it now."""
        return self._fingerprints_now()[0]

    def vision(self) -> str:
        """As `fingerprint`, of all but the decoder's layers."""
        return self._fingerprints_now()[1]

    def vocabulary(self) -> str:
        """As `Identity.vocabulary`. Read again when the processor's settings change."""
        settings = digests.settings_state(self._processor)
        if self._words is None or self._words[0] != settings:
            self._words = (settings, digests.vocabulary_digest(self._processor))
        return self._words[1]

    def answers(self) -> Answers:
        """As `Identity.answers`.

        If they are others than the first ones, the tensors are digested again, since a write may have missed
        the witness: then the fingerprint is another. Raises ComputationChanged if it is not, and for a model
        whose fingerprint changes with each forward.
        """
        for _ in range(_TRIES):
            fingerprint = self.fingerprint()
            now = self._prober.answers_now()
            if self.fingerprint() != fingerprint:
                continue  # the model was changed meanwhile
            first, difference = self._prober.compare(fingerprint, now)
            if not difference:
                return first
            with self._lock:  # all tensors are digested again at the next access
                self._last_look = self._tensors = None
                (_steady.get() or {}).pop(self, None)
            if self.fingerprint() == fingerprint:
                raise ComputationChanged(difference)
        raise ComputationChanged(
            f"the fingerprint of this {type(self._model).__name__} changes with each forward, so no KV of it "
            "can be used again: a hook or a module in it writes what it reads; register a hook that only "
            "counts as an Observer (kamera.engines.hf)"
        )

    def name(self, of_files: str) -> None:
        """As `Identity.name`."""
        base = self._look()[0]
        if not (self.unread or self._witness.computation.foreign):
            self._of_files = (base, of_files)

    @property
    def unread(self) -> tuple[str, ...]:
        """What of the model cannot be digested, a line each: its fingerprints hold in this process alone."""
        return self._witness.computation.unread

    @contextmanager
    def steady(self) -> Iterator[None]:
        """As `Identity.steady`."""
        if _steady.get() is not None:
            yield
            return
        token = _steady.set({})
        try:
            yield
        finally:
            _steady.reset(token)

    def _fingerprints_now(self) -> tuple[str, str]:
        steady_fingerprints = _steady.get()
        both = None if steady_fingerprints is None else steady_fingerprints.get(self)
        if both is None:
            both = self._look()
            if steady_fingerprints is not None:
                steady_fingerprints[self] = both
        autocast = _autocast(self._devices)
        if not autocast:
            return both
        whole, vision = (digest("kamera.autocast.v1", base, *autocast) for base in both)
        return whole, vision

    def _look(self) -> tuple[str, str]:
        with self._lock:
            now = (self._witness.look(), digests.settings_state(self._processor))
            self.moves += self._last_look != now
            if self._last_look != now or self._has_other_facts:
                self._take_anew(*now)
            if self._has_other_facts:
                raise ComputationChanged(
                    f"the rotary angles of this {type(self._model).__name__}, or their limit, are not those "
                    "that this Backbone read from it: put them back, or make a new Backbone of it"
                )
            base, vision = self._both
            if self._of_files is not None and self._of_files[0] == base:
                base = self._of_files[1]
            return base, vision

    def _take_anew(self, look: Look, settings: bytes) -> None:
        if self._tensors is None or self._tensors[0] != look.tensors:
            self._tensors = (look.tensors, digests.tensors_digests(self._model, self._decoder))
        if self._settings is None or self._settings[0] != settings:
            self._settings = (settings, digests.processor_digest(self._processor))
        self._both = digests.fingerprints(
            self._model,
            self._decoder,
            self._layout,
            self._facts[1],
            self._tensors[1],
            look.settings,
            self._settings[1],
        )
        self._has_other_facts = self._read_facts() != self._facts
        self._last_look = (look, settings)

    def _read_facts(self) -> tuple[Any, Any]:
        """The facts that a Backbone reads off a model once and relocates by: phases, and their limit."""
        limits = probe.position_limits(self._model)
        limit = None if limits.below is None else (limits.below, limits.reason)
        return probe.probe_ropes(self._decoder, len(self._layout)), limit


def _autocast(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The autocast this thread runs under, by device type; empty for none."""
    on = filter(torch.is_autocast_enabled, devices)
    return tuple(f"{device}:{torch.get_autocast_dtype(device)}" for device in on)
