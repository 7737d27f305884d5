"""A Mooncake of one's own: a master, and one client that lends memory; both can be killed."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

_PLACE = importlib.util.find_spec("mooncake")
MASTER = None if _PLACE is None else Path(str(_PLACE.origin)).parent / "mooncake_master"
MISSING = (
    "Mooncake is not installed: pip install 'kamera-kv[mooncake]', apt-get install libibverbs1 librdmacm1"
)

_LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
print(client.setup("localhost", "P2PHANDSHAKE", 64 << 20, 1 << 20, "tcp", "", sys.argv[1]), flush=True)
for _ in sys.stdin:
    print(client.remove_all(True), flush=True)
"""


class MooncakeServer:
    """Serves 64 MiB over TCP loopback. What it held is gone after `kill`."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self._port, self._metrics = one.getsockname()[1], other.getsockname()[1]
        self._running: list[subprocess.Popen[str]] = []
        self.start()

    def url(self, query: str = "timeout=60") -> str:
        """The url of a store in it."""
        return f"mooncake://127.0.0.1:{self._port}?metrics={self._metrics}&{query}"

    def start(self) -> None:
        """Start it, empty, and wait until memory is lent."""
        ports = ["-rpc_port", str(self._port), "-metrics_port", str(self._metrics)]
        quiet = ["-metrics_host", "127.0.0.1", "-enable_metric_reporting=false"]
        lender = [sys.executable, "-c", _LENDER, f"127.0.0.1:{self._port}"]
        for command in ([str(MASTER), *ports, *quiet], lender):
            self._running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        if (said := self._said()) != "0":
            self.kill()
            raise RuntimeError(f"Mooncake did not start: {said}")

    def empty(self) -> None:
        """Remove what is there; start it where it was killed."""
        if not self._running:
            self.start()
        asked = self._running[1].stdin
        assert asked is not None
        asked.write("\n")
        asked.flush()
        self._said()

    def kill(self) -> None:
        """SIGKILL, as when the machines die."""
        for process in self._running:
            process.kill()
            process.wait()
        self._running.clear()

    def _said(self) -> str:
        told = self._running[1].stdout
        assert told is not None
        return told.readline().strip()
