"""Each backbone's answers to the probe at its first use with this store, kept beside the objects.

A fingerprint binds all of a model that can be digested. A change that cannot be (a function patched in
place, a kernel that computes wrongly) shows in the model's answers. Answers are compared within a
tolerance, so they are never part of a key.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kamera import forks
from kamera.errors import ComputationChanged
from kamera.ops import digest
from kamera.store.codec import Codec

logger = logging.getLogger(__name__)

FOLDER = "probes"
Answers = Mapping[str, Sequence[float]]


class Probes:
    """Answers by fingerprint: in memory, and in a folder of ``root`` if given. Safe from several threads.

    An encrypted store encrypts them. A file that cannot be read, written or parsed costs a warning, and the
    probe is taken anew: it guards against accidents of a machine, not against an attacker with write access.
    """

    def __init__(self, root: Path | None, codec: Codec) -> None:
        self._folder = None if root is None else root / FOLDER
        self._codec = codec
        self._lock = forks.Lock()
        self._known: dict[str, Answers] = {}

    def compare(self, fingerprint: str, ask: Callable[[], Answers], tolerance: float) -> None:
        """Compare a backbone's answers now with its first ones; keep them if these are the first.

        Raises ComputationChanged if their distance exceeds ``tolerance``, a share of the first ones' length.
        """
        now = ask()
        with self._lock:
            known = self._known.get(fingerprint) or self._read(fingerprint)
            if known is None:
                self._write(fingerprint, now)
            self._known[fingerprint] = known = known or now
        for name in sorted(known.keys() & now.keys()):
            apart = _distance(known[name], now[name])
            if not apart <= tolerance:
                raise ComputationChanged(
                    f"backbone {fingerprint[:12]} answers the {name} probe otherwise than when this store "
                    f"was first used with it (relative distance {apart:.1e}, tolerance {tolerance:.0e}): "
                    "nothing that can be digested differs; undo what was patched, or use another store"
                )

    def _read(self, fingerprint: str) -> Answers | None:
        if self._folder is None:
            return None
        path = self._path(fingerprint)
        try:
            held = json.loads(self._codec.unveil(path.read_text(encoding="utf-8")))
            answers = {str(name): [float(x) for x in values] for name, values in held.items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("the probe of backbone %s is taken anew: %s", fingerprint[:12], error)
            return None
        return answers

    def _write(self, fingerprint: str, answers: Answers) -> None:
        if self._folder is None:
            return
        path = self._path(fingerprint)
        aside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(self._codec.veil(json.dumps(answers)))
            os.replace(aside, path)
        except OSError as error:
            logger.warning("the probe of backbone %s is not kept: %s", fingerprint[:12], error)
            with contextlib.suppress(OSError):
                os.unlink(aside)

    def _path(self, fingerprint: str) -> Path:
        assert self._folder is not None
        return self._folder / self._codec.name(digest("kamera.probe.v1", fingerprint))


def _distance(known: Sequence[float], now: Sequence[float]) -> float:
    """Relative L2; infinite for answers of another length, nan for answers that are no numbers."""
    if len(known) != len(now):
        return math.inf
    length = math.sqrt(sum(x * x for x in known))
    return math.dist(known, now) / max(length, 1e-30)
