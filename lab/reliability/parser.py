"""Coverage-guided fuzzing of the parser with atheris (``kamera[fuzz]``); ``--size`` is the number of inputs.

The fuzzer invents what stands behind the digest, from true headers on; a digest that fits is put to
it, so that every input reaches the parser. Each must be refused by name, or be exactly the file
that would be written of the record that was read.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from kamera.errors import StoreError
from kamera.store import entries, head, opened, records
from kamera.store.codec import Codec
from lab.reliability import rig
from lab.reliability.forge import front_of, seal
from lab.reliability.fuzz import CREATED, outcome

SIZE: int = 50_000
_FIGURES = ("inputs", "refused", "reads as written", "differs", "other errors")
_START = 99  # behind the digest
_TOKENS = (
    '"kamera"',
    '\\"format\\":1',
    '\\"algorithm\\":\\"sha256\\"',
    '\\"kv/0/k\\":\\"',
    '\\"groups\\":[[',
    '"data_offsets":[0,0]',
    '"shape":[]',
    "null",
    "1e999",
)


def run(size: int, seed: int) -> dict[str, Any]:
    """Have atheris try ``size`` inputs. Raises `StoreError` without it."""
    try:
        import atheris
    except ImportError as error:
        raise StoreError("atheris is not installed: pip install 'kamera[fuzz]'") from error
    # shared with the child, which libFuzzer ends without a return
    shared = mmap.mmap(-1, struct.calcsize("<5Q"))
    with tempfile.TemporaryDirectory() as folder:
        bases = [(rig.record(slot, 7).key, Codec().encode(rig.record(slot, 7), CREATED)) for slot in (0, 2)]
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for i, (_, data) in enumerate(bases):
            (corpus / str(i)).write_bytes(bytes([i]) + data[_START : front_of(data)])
        words = Path(folder) / "words"
        words.write_text("".join(f"{json.dumps(token)}\n" for token in _TOKENS), encoding="utf-8")

        def work() -> None:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 2)
            _instrument(atheris)
            options = [f"-atheris_runs={size}", f"-seed={seed + 1}", "-max_len=3000", f"-dict={words}"]
            atheris.Setup(["parser", str(corpus), *options], lambda given: _try(given, bases, shared))
            try:
                atheris.Fuzz()
            except SystemExit as ended:  # its way to say that it is done
                if ended.code:
                    raise

        _, status = os.waitpid(rig.fork(work), 0)
    counts = dict(zip(_FIGURES, struct.unpack("<5Q", shared[:]), strict=True))
    return counts | {"crashes": int(not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0))}


def assembled(given: bytes, bases: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """The key asked for and a sealed file whose header is ``given`` behind its digest."""
    key, base = bases[given[0] % len(bases)] if given else bases[0]
    rest = base[front_of(base) :]
    header = base[8:_START] + given[1:]
    return key, seal(len(header).to_bytes(8, "little") + header + rest)


def _try(given: bytes, bases: list[tuple[str, bytes]], shared: mmap.mmap) -> None:
    key, data = assembled(given, bases)
    for figure in ("inputs", outcome(data, key, sealed=True)):
        at = 8 * _FIGURES.index(figure)
        shared[at : at + 8] = (int.from_bytes(shared[at : at + 8], "little") + 1).to_bytes(8, "little")


def _instrument(atheris: Any) -> None:
    """Have the fuzzer see which branches the parser takes; it was imported long before."""
    for function in (
        Codec.open,
        head.read_head,
        head.verify_header,
        head._parse,
        head.front_size,
        head._rebuilt,
        head._key_of,
        entries.meta_tensor_of,
        entries.pieces_of,
        opened.OpenObject.__init__,
        opened.OpenObject.fill,
        records.CanonicalRecord.from_parts.__func__,  # type: ignore[attr-defined]
        records.PatchRecord.from_parts.__func__,  # type: ignore[attr-defined]
    ):
        atheris.instrument_func(function)
