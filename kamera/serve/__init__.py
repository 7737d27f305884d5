"""A server whose conversations keep their caches: OpenAI's and Anthropic's APIs in front of sessions.

It needs ``pip install 'kamera[serve]'``.
"""

from kamera.serve.app import Front
from kamera.serve.keys import Keys
from kamera.serve.refusal import Refusal
from kamera.serve.run import Server, bound, run, server_of
from kamera.serve.service import Service
from kamera.serve.within import Within

__all__ = ["Front", "Keys", "Refusal", "Server", "Service", "Within", "bound", "run", "server_of"]
