"""A real S3 server over HTTP (moto's), in a thread of this process; it counts what it is asked."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import Any

BUCKET = "bucket"
MISSING = "moto's server is not installed: pip install 'kamera-kv[test]'"


class S3Server:
    """Serves one bucket. ``requests`` counts by method since the last `reset`.

    ``heeds_conditions`` false: it takes If-Match and If-None-Match and writes all the same, as some
    services do. Raises `ImportError` without moto's server.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self.requests: Counter[str] = Counter()
        self.heeds_conditions = True
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What tells a client of this server."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def url(self, query: str = "timeout=60&retries=0") -> str:
        """The url of a store in the bucket."""
        return f"s3://{BUCKET}/folder?{query}"

    def reset(self) -> None:
        """Empty the bucket."""
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")
        self.heeds_conditions = True
        self.requests.clear()

    def stop(self) -> None:
        """Shut it down; the port is closed."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        self.requests[environ["REQUEST_METHOD"]] += 1
        if not self.heeds_conditions:
            environ = {k: v for k, v in environ.items() if k not in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")}
        return self._app(environ, start)

    def _ask(self, method: str, path: str) -> None:
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=30) as connection:
            text = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(text.encode())
            answer = b""
            while part := connection.recv(65536):
                answer += part
        if not answer.split(b" ", 2)[1:2] == [b"200"]:
            raise RuntimeError(f"{method} {path}: {answer[:200]!r}")
