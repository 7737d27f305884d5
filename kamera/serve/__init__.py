"""A server whose conversations keep their caches: OpenAI's and Anthropic's APIs in front of sessions.

It needs ``pip install 'kamera-kv[serve]'``.
"""

from kamera.serve.app import Front, Notice, run, server_of
from kamera.serve.keys import LOCAL, Keys
from kamera.serve.limits import Limits
from kamera.serve.refusal import Refusal
from kamera.serve.service import Service, Within
from kamera.window.view.live import bind_socket

__all__ = [
    "LOCAL",
    "Front",
    "Keys",
    "Limits",
    "Notice",
    "Refusal",
    "Service",
    "Within",
    "bind_socket",
    "run",
    "server_of",
]
