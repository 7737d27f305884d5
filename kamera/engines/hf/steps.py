"""Answers of several threads, decoded together: one forward a step, in which each answer is a row.

Each answer is made by its own thread, with logits processors, stopping criteria and a cache of its own.
Between two tokens the threads meet here: the last one to come runs the model once for all that wait. An
answer joins with its first step and leaves by leaving its block, whatever its reason; the others do not
notice. One that takes long between two tokens (a streamer that blocks) is waited for as long as `_PATIENCE`
forwards take; after a second it keeps no other from a place, as what it waits for may be that other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field

import torch

from kamera import forks
from kamera.engines.hf import forwards
from kamera.engines.hf.encode import input_device
from kamera.engines.hf.model import Model, ModelCache
from kamera.engines.hf.prove import why_no_rows
from kamera.engines.precedence import check_cancelled, is_later

ROWS = 16
"""Answers that are decoded at once, at most; others wait for a place before they run anything."""

LIVE_BYTES = 8 << 30
"""KV that they attend to, at most; one that alone has more is decoded alone."""

_PATIENCE = 2.0
_LEAST = 0.01  # seconds
_AWAY = 1.0  # seconds between two tokens, after which a row's place is another's, too


@dataclass(eq=False)
class AnswerRow:
    """One answer's place. Made by `Steps.row`, used by the thread that made it."""

    steps: Steps
    tokens: int
    thread: int = field(default_factory=threading.get_ident)
    asks: tuple[torch.Tensor, torch.Tensor, ModelCache] | None = None  # token, positions, past
    outcome: torch.Tensor | BaseException | None = None
    runs: int = 0  # forwards that this row's account bears
    comes: bool = False  # it is at its last token, and will ask for the next one
    logits_time: float | None = None  # when it got its last logits, and None while it waits for some

    def begin(self) -> None:
        """It has its first logits: the others wait for its first step."""
        self.comes, self.logits_time = not self.steps.runs_alone, time.monotonic()

    @property
    def is_away(self) -> bool:
        """True if its thread does something else than to ask for its next token."""
        return self.logits_time is not None and time.monotonic() - self.logits_time > _AWAY

    def step(self, token: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
        """Next-token logits ``[1, vocabulary]`` after ``token`` ``[1, 1]`` at ``positions`` ``[axes, 1]``.

        ``past`` is extended by the token. Raises what the forward raises, in every row of it.
        """
        check_cancelled()
        self.asks, self.logits_time = (token, positions, past), None
        try:
            return self.steps.step(self)
        finally:
            self.logits_time = time.monotonic()


class Steps:
    """The rows of one backbone, and their meeting. Safe for threads, which is what it is for."""

    def __init__(self, model: Model, rows: int = ROWS, live_bytes: int = LIVE_BYTES) -> None:
        self._model = model
        self._most, self._most_tokens = rows, max(1, live_bytes // max(1, model.facts.bytes_per_token))
        self._reset()
        forks.call_in_child(self, Steps._reset)

    def _reset(self) -> None:
        self._change = threading.Condition()
        self._rows: list[AnswerRow] = []
        self._waiting_rows: deque[AnswerRow] = deque()
        self._asking_rows: list[AnswerRow] = []
        self._running_rows: list[AnswerRow] = []
        self._end_time, self._seconds = 0.0, 0.0
        self._reason: str | None = None
        self._is_proving = False

    @property
    def why_serial(self) -> str:
        """Why answers that several threads decode at once share no forwards; "" if they do.

        Proved on a few tokens when it is asked first, or when two answers first meet.
        """
        if self._reason is None:
            self._reason = why_no_rows(self._model)
        return self._reason

    @property
    def runs_alone(self) -> bool:
        """True in a thread that runs its own forwards: later work, under autocast, alone on the model."""
        device = input_device(self._model.model)
        if is_later() or self._model.turns.holds_model or torch.is_autocast_enabled(device.type):
            return True
        return device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(
            device
        )

    @contextmanager
    def row(self, tokens: int) -> Iterator[AnswerRow]:
        """A place for an answer of ``tokens`` tokens, its prompt included: waits in order until there is one.

        Whoever runs its own forwards takes none, and does not wait; nor does a thread that has one already,
        as a streamer that asks a question of its own.
        """
        row = AnswerRow(self, tokens)
        if self.runs_alone:
            yield row
            return
        with self._change:
            self._waiting_rows.append(row)
            try:
                while not self._admits(row):
                    self._change.wait(_AWAY)
                    check_cancelled()
            finally:
                self._waiting_rows.remove(row)
            self._rows.append(row)
            self._change.notify_all()
        try:
            yield row
        finally:
            with self._change:
                self._change.wait_for(lambda: row not in self._running_rows)  # its thread was interrupted
                for rows in (self._rows, self._asking_rows):
                    if row in rows:  # not in a child that was forked inside
                        rows.remove(row)
                self._change.notify_all()

    def step(self, row: AnswerRow) -> torch.Tensor:
        """As `AnswerRow.step`."""
        if len(self._rows) < 2 or self.runs_alone or self._is_serial():
            return self._forward([row])[0]
        with self._change:
            row.outcome, row.comes, arrival = None, False, time.monotonic()
            self._asking_rows.append(row)
            self._change.notify_all()
            while row.outcome is None and not self._is_step_due(arrival):
                self._change.wait(None if self._running_rows else self._seconds_left(arrival))
            rows = [] if row.outcome is not None else self._take()
        if rows:
            self._run(rows)
        self._model.meter.add(forwards=row.runs, tokens=1)
        outcome, row.outcome = row.outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None, "a row that was run has logits"
        return outcome

    # -- inside --------------------------------------------------------------------------------

    def _admits(self, row: AnswerRow) -> bool:
        if any([other.thread == row.thread for other in self._rows]):
            return True
        present_rows = [other for other in self._rows if not other.is_away]
        tokens = row.tokens + sum([other.tokens for other in present_rows])
        fits = len(present_rows) < self._most and tokens <= self._most_tokens
        return self._waiting_rows[0] is row and (fits or not present_rows)

    def _is_serial(self) -> bool:
        """True if rows may not share forwards, or while another thread finds out: nobody waits for that."""
        if self._reason is None:
            with self._change:
                if self._is_proving:
                    return True
                self._is_proving = True
            try:
                return bool(self.why_serial)
            finally:
                self._is_proving = False
        return bool(self.why_serial)

    def _seconds_left(self, arrival: float) -> float:
        """Seconds that one who came at ``arrival`` waits on for the others."""
        patience = max(_LEAST, _PATIENCE * self._seconds)
        return max(0.0, max(arrival, self._end_time) + patience - time.monotonic())

    def _is_step_due(self, arrival: float) -> bool:
        if self._running_rows:
            return False
        return not any(row.comes for row in self._rows) or not self._seconds_left(arrival)

    def _take(self) -> list[AnswerRow]:
        self._running_rows, self._asking_rows = self._asking_rows, []
        for row in self._rows:
            row.comes = False  # who is late comes when it comes
        return self._running_rows

    def _run(self, rows: Sequence[AnswerRow]) -> None:
        start = time.monotonic()
        outcomes: Sequence[torch.Tensor | BaseException]
        try:
            # no account is open there: each row's own thread counts its token
            outcomes = Context().run(self._forward, rows)
        except BaseException as error:
            outcomes = [error] * len(rows)
        with self._change:
            for i, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
                row.outcome, row.runs, row.comes = outcome, int(not i), row in self._rows
            self._running_rows, self._end_time = [], time.monotonic()
            self._seconds = self._end_time - start
            self._change.notify_all()

    def _forward(self, rows: Sequence[AnswerRow]) -> Sequence[torch.Tensor]:
        tokens, positions, pasts = zip(*(row.asks for row in rows if row.asks), strict=True)
        return forwards.next_logits(
            self._model, torch.cat(tokens), torch.stack(positions, dim=1), *pasts
        ).split(1)
