"""A server on loopback for a measurement, in a thread of this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from kamera.serve import Front, Keys, Service, bind_socket, server_of


@contextmanager
def serving(service: Service, **options: Any) -> Iterator[str]:
    """The address of a server of ``service``, on a free port; it ends with the context."""
    sock = bind_socket("127.0.0.1", 0)
    server = server_of(Front(service, Keys(None), ["served"], **options), sock)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    with redirect_stdout(sys.stderr):  # servers say where they are
        thread.start()
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
