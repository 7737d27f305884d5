"""One arm of the session: an engine in this process, a window over it, and what both ran, turn by turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm.bed import PICTURES, pictures_directory, scheduler_of, start
from benchmarks.vllm.stream import Turn
from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.engines import EngineCompletion, EnginePrompt
from kamera.engines.vllm.clients import Offline
from kamera.window import EngineWindow

PREFIX = "prefix cache"
WARMED = "prefix cache, warmed"
SURVIVOR, FORMED = "survivor", "formed"
ARMS = (PREFIX, WARMED, SURVIVOR, FORMED)


@dataclass
class Ran:
    """What an engine ran: forwards, their tokens, pictures encoded."""

    forwards: int = 0
    tokens: int = 0
    encodes: int = 0

    def since(self, before: Ran) -> dict[str, int]:
        return {name: value - vars(before)[name] for name, value in vars(self).items()}

    def copy(self) -> Ran:
        return Ran(**vars(self))


def counted(llm: Any) -> Ran:
    """Counts of an engine from now on, taken from what its scheduler hands to the model."""
    scheduler, ran = scheduler_of(llm), Ran()
    schedule: Callable[..., Any] = scheduler.schedule

    def counting(*given: Any) -> Any:
        step = schedule(*given)
        ran.forwards += step.total_num_scheduled_tokens > 0
        ran.tokens += step.total_num_scheduled_tokens
        ran.encodes += sum(map(len, step.scheduled_encoder_inputs.values()))
        return step

    scheduler.schedule = counting
    return ran


class Clock:
    """Seconds since it was made: of the wall, and of the processor for this whole process."""

    def __init__(self) -> None:
        self._wall, self._own = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """The seconds so far."""
        return {"wall": time.perf_counter() - self._wall, "processor": time.process_time() - self._own}


class _Timed:
    """A client that says how long the engine took, from a prompt to its answer of one token."""

    def __init__(self, inner: Offline) -> None:
        self._inner = inner
        self.taken = Clock().read()

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        clock = Clock()
        done = list(self._inner.stream(prompt))
        self.taken = clock.read()
        yield from done


class Arm:
    """A way to serve a stream of pictures of which ``keep`` stay in view, in an engine of its own."""

    def __init__(self, name: str, keep: int) -> None:
        self.name, self._keep = name, keep
        folder = Path(tempfile.mkdtemp(prefix="kamera-session-"))
        model, where = pictures_directory(folder / "model"), folder / "store"
        pages = {"num_gpu_blocks_override": 1024, "disable_log_stats": True, **PICTURES}
        pages |= {"limit_mm_per_prompt": {"image": keep, "video": 0}}
        plain = name in (PREFIX, WARMED)
        self._llm = start(model, None if plain else where, {"harvest": "256MiB"}, **pages)
        self._ran = counted(self._llm)
        self._backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
        self._store = ChunkStore.open(where)
        self._engine = _Timed(Offline(self._llm, self._backbone.builder.vision_tokens))
        self.begin()

    def begin(self) -> None:
        """Open an empty window."""
        self._window = self._opened()

    def answer(self, turn: Turn) -> dict[str, Any]:
        """A picture comes, the oldest leaves for it, a question is answered with one token."""
        window, before = self._window, self._ran.copy()
        clock = Clock()
        if len(window.slots) == self._keep:
            window.slide()
        window.append(turn.frame.content)
        answer = window.generate(turn.text, 1)
        whole = clock.read()
        return {
            **self._ran.since(before),
            "engine": self._engine.taken,
            "whole": whole,
            "prompt": answer.supplied + answer.computed,
            "right": answer.text == turn.answer,
            "bound": turn.bound,
            "origins": [slot.origin for slot in answer.slots],
        }

    def later(self, turn: Turn) -> dict[str, Any]:
        """What no answer waits for."""
        window, before, clock = self._window, self._ran.copy(), Clock()
        if self.name in (SURVIVOR, FORMED):
            window.keep()
            self._idle()
            window.look()
            assert all(slot.origin != "computed" for slot in window.slots), window.slots
        full = len(window.slots) == self._keep
        if self.name in (WARMED, FORMED) and full:
            window.anticipate()
        self._idle()
        return {**self._ran.since(before), "whole": clock.read()}

    # -- inside --------------------------------------------------------------------------------

    def _opened(self) -> EngineWindow:
        return EngineWindow(
            self._engine,
            self._backbone,
            self._store,
            fingerprint=self._backbone.fingerprint,
            policy=ReusePolicy(),
        )

    def _idle(self) -> None:
        """Wait until what was read back is stored, so that no other arm's turn runs beside it."""
        if self.name in (PREFIX, WARMED):
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        harvester = get_kv_transfer_group()._threads
        while harvester._bytes:
            time.sleep(0.02)


def run_arm(pipe: Any, name: str, keep: int) -> None:
    """An arm in a process: it carries out names of its methods with their arguments until it gets None."""
    arm = Arm(name, keep)
    pipe.send(name)
    while (asked := pipe.recv()) is not None:
        what, *given = asked
        pipe.send(getattr(arm, what)(*given))
