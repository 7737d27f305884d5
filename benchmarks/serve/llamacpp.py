"""llama.cpp's server on a port, in an environment of its own that has ``xllamacpp``; it ends with its stdin.

python llamacpp.py MODEL.gguf PORT TOKENS      # `n_cache_reuse`: the shortest run that is moved; 0 moves none

One thread; two slots, so that a request of a cold prompt leaves the agent's slot as it is.
"""

from __future__ import annotations

import sys

import xllamacpp


def main(model: str, port: str, reuse: str) -> None:
    """Serve until stdin ends."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_cache_reuse = model, int(port), int(reuse)
    params.n_ctx, params.n_parallel, params.use_jinja = 8192, 2, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
