"""The identity of a live model: its fingerprint, brought up to date at every access."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from kamera import forks
from kamera.engines.hf import fingerprint as digests
from kamera.engines.hf import probe
from kamera.engines.hf.computation import autocast
from kamera.engines.hf.witness import Look, Witness
from kamera.errors import ComputationChanged
from kamera.ops import Layout, digest

logger = logging.getLogger(__name__)

_steady: ContextVar[dict[ModelIdentity, tuple[str, str]] | None] = ContextVar("kamera_steady", default=None)
"""Both fingerprints of the models that this thread has looked at since its operation began."""


class ModelIdentity:
    """The fingerprints of a live model and its processor. Safe to use from several threads.

    Unchanged parts are not digested again: tensors, settings and processor each have a digest of their own.
    """

    def __init__(
        self, model: nn.Module, decoder: nn.Module, processor: Any | None, layout: Layout, limit: Any
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._processor = processor
        self._layout = layout
        self._limit = limit
        self._facts = self._read_facts()
        self._lock = forks.Lock()
        self._witness = Witness(model, decoder)
        self._devices = tuple(sorted({p.device.type for p in model.parameters()}))
        self._seen: tuple[Look, bytes] | None = None
        self._base = self._vision = ""
        self._changed = False
        self._tensors: tuple[Any, tuple[str, str]] | None = None
        self._settings: tuple[bytes, str] | None = None
        self._of_files: tuple[str, str] | None = None  # the digest of the model as loaded, and its files' own
        if self.unread:
            logger.warning(
                "something in this %s cannot be digested (%s): its fingerprint is that of this Backbone "
                "alone, and nothing it stores is served to another",
                type(model).__name__,
                "; ".join(self.unread[:3]),
            )
        self.moves = 0
        """Number of changes seen in the model, including those that left the fingerprint as it was."""

    def fingerprint(self) -> str:
        """Fingerprint of the model as this thread would run it now.

        Raises ComputationChanged if the rotary facts are no longer those that were probed.
        """
        return self._now()[0]

    def vision(self) -> str:
        """Fingerprint of the parts that encode a chunk: all but the decoder's layers. As `fingerprint`."""
        return self._now()[1]

    def name(self, of_files: str) -> None:
        """Give the model as it is now the fingerprint ``of_files`` that it was loaded from.

        Any change gives it one of its own, and taking that back gives it this one again. A model that holds
        anything which is in no file keeps its own.
        """
        base = self._looked()[0]
        if not (self.unread or self._witness.foreign):
            self._of_files = (base, of_files)

    @property
    def unread(self) -> tuple[str, ...]:
        """What of the model cannot be digested, a line each: its fingerprints hold in this process alone."""
        return self._witness.unread

    def digest_anew(self) -> None:
        """Digest all tensors again at the next access, whatever the witness sees."""
        with self._lock:
            self._seen = self._tensors = None
            (_steady.get() or {}).pop(self, None)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """As `Engine.steady`."""
        if _steady.get() is not None:
            yield
            return
        token = _steady.set({})
        try:
            yield
        finally:
            _steady.reset(token)

    def _now(self) -> tuple[str, str]:
        looked = _steady.get()
        both = None if looked is None else looked.get(self)
        if both is None:
            both = self._looked()
            if looked is not None:
                looked[self] = both
        running = autocast(self._devices)
        if not running:
            return both
        whole, vision = (digest("kamera.autocast.v1", base, *running) for base in both)
        return whole, vision

    def _looked(self) -> tuple[str, str]:
        with self._lock:
            now = (self._witness.look(), digests.settings_state(self._processor))
            if self._seen != now:
                self._take_anew(*now)
            if self._changed:
                raise ComputationChanged(
                    f"the rotary angles of this {type(self._model).__name__}, or their limit, are not those "
                    "that this Backbone read from it: put them back, or make a new Backbone of it"
                )
            named = self._of_files
            base = named[1] if named is not None and named[0] == self._base else self._base
            return base, self._vision

    def _take_anew(self, seen: Look, settings: bytes) -> None:
        if self._tensors is None or self._tensors[0] != seen.tensors:
            self._tensors = (seen.tensors, digests.tensors_digests(self._model, self._decoder))
        if self._settings is None or self._settings[0] != settings:
            self._settings = (settings, digests.processor_digest(self._processor))
        self._base = digests.fingerprint(
            self._model,
            self._layout,
            self._limit,
            tensors=self._tensors[1][0],
            settings=seen.settings,
            processor=self._settings[1],
        )
        self._vision = digests.vision_fingerprint(
            self._model,
            self._decoder,
            tensors=self._tensors[1][1],
            settings=seen.vision,
            processor=self._settings[1],
        )
        self._changed = self._read_facts() != self._facts
        self._seen = (seen, settings)
        self.moves += 1

    def _read_facts(self) -> Any:
        """The facts that a Backbone reads off a model once and relocates by."""
        return probe.probe_ropes(self._decoder, len(self._layout)), probe.position_limit(self._model)
