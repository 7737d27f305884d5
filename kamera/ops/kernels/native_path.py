"""The fused operator, compiled for the CPU: every value is read once and written once.

The kernel is built once per machine, if a C compiler is present. Installation builds nothing and requires
nothing: without a working compiler, or with ``KAMERA_NATIVE=0`` in the environment, there is no library and
the torch implementation runs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from kamera.ops.kernels.launches import Launch, Writing, can_launch, launches
from kamera.ops.lowrank import floats
from kamera.ops.rope import rotation_table

_SOURCE = Path(__file__).with_name("serve.c")
_TUNED = {
    "x86_64": ["-march=native", "-mprefer-vector-width=512"],
    "aarch64": ["-mcpu=native"],
    "arm64": ["-mcpu=native"],
}
_SECONDS = 60

_log = logging.getLogger(__name__)


class LaunchStruct(ctypes.Structure):
    """``struct launch`` of serve.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for names in (
            ("table", "lines", "heads", "tokens", "dim", "start", "pairs", "interleaved", "cos", "sin"),
            ("source_kind", "target_kind", "s_head", "s_token", "y_head", "y_token", "g_head", "g_token"),
            ("token_group", "feature_group", "largest"),
        )
        for name in names
    ]


@cache
def native_library() -> ctypes.CDLL | None:
    """The kernel, or None if it cannot be built. The first call on a machine builds it (one second)."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.name != "posix" or os.environ.get("KAMERA_NATIVE") == "0":
        return None
    try:
        built = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _log.info("no compiled CPU kernel, torch serves instead: %s", detail)
        return None
    built.kamera_serve.argtypes = [ctypes.POINTER(LaunchStruct), ctypes.c_int64]
    built.kamera_serve.restype = ctypes.c_int
    built.kamera_half.restype = ctypes.c_int
    return built


def _build(compiler: str) -> Path:
    """The shared library for this source, compiler and processor, from the user's cache or built now."""
    tuned = _TUNED.get(platform.machine(), [])
    flags = ["-O3", *tuned, "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"]
    version = _run([compiler, "--version"])
    named = "\0".join((_SOURCE.read_text(), *flags, compiler, version, _processor()))
    path = _cache() / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")  # another process may build the same
        try:
            _run([compiler, *flags, "-shared", "-fPIC", "-pthread", "-o", str(part), str(_SOURCE)])
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


def _cache() -> Path:
    """A directory that only this user can write to; a temporary one if the home has none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(home) / "kamera" / "kernels"
    try:
        if path.is_absolute():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = path.stat()
            if held.st_uid == os.getuid() and not held.st_mode & 0o022 and os.access(path, os.W_OK):
                return path
    except OSError:
        pass
    own = tempfile.mkdtemp(prefix="kamera-kernels-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def _processor() -> str:
    """The processor the library is compiled for; another machine with this home may lack its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))


_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODES = {8: 3, 4: 4}
_VALUES_PER_THREAD = 1 << 15
"""Values below which starting a thread takes longer than the work."""


def can_write(given: Writing) -> bool:
    """True if the kernel is built and supports these dtypes and strides."""
    built = native_library()
    if built is None:
        return False
    return can_launch(given, frozenset(_KINDS) - (set() if built.kamera_half() else {torch.float16}))


def write_kv(given: Writing) -> None:
    """`kamera.ops.kernels.serve` for arguments for which `can_write` is true."""
    with torch.inference_mode():  # the target may have been made in it
        for launch in launches(given):
            _launch(launch, given.offset)


def _launch(launch: Launch, offset: tuple[int, ...]) -> None:
    target, rope = launch.target, launch.rope
    layers, heads, tokens, dim = target.shape
    if not target.numel():
        return
    if rope is None and launch.factors is None and not launch.bits:  # neither rotated nor decoded: a copy
        target.copy_(launch.source)
        return
    kept, factors = _kernel_tensors(launch)  # alive until the kernel returns
    source, steps, lows = launch.source, *kept[:2]
    none = [0] * layers
    codes = [none if held is None else _layers(held, layers) for held in (steps, lows)]
    places = [_layers(source, layers), *codes, _layers(target, layers)]
    table = torch.tensor([*places, *factors], dtype=torch.int64).T.contiguous()
    cos = sin = None
    if rope is not None:
        cos, sin = rotation_table(rope, offset, torch.float32, torch.device("cpu"))
    largest = ctypes.c_float(torch.finfo(launch.dtype).max)
    job = LaunchStruct(
        table=table.data_ptr(),
        lines=layers,
        heads=heads,
        tokens=tokens,
        dim=dim,
        start=launch.start,
        pairs=0 if cos is None else cos.shape[0],
        interleaved=rope is not None and rope.pairing == "interleaved",
        cos=0 if cos is None else cos.data_ptr(),
        sin=0 if sin is None else sin.data_ptr(),
        source_kind=_CODES[launch.bits] if launch.bits else _KINDS[launch.dtype],
        target_kind=_KINDS[target.dtype],
        s_head=launch.strides[1],
        s_token=launch.strides[2],
        y_head=launch.strides[4],
        y_token=launch.strides[5],
        g_head=launch.strides[7],
        g_token=launch.strides[8],
        token_group=launch.token_group,
        feature_group=launch.feature_group,
        largest=ctypes.addressof(largest),
    )
    threads = min(torch.get_num_threads(), 1 + target.numel() // _VALUES_PER_THREAD)
    built = native_library()
    assert built is not None, "can_write was not asked"
    if built.kamera_serve(ctypes.byref(job), threads):
        raise MemoryError(f"no memory for {threads} threads' scratch of {dim} features")


def _kernel_tensors(launch: Launch) -> tuple[tuple[torch.Tensor | None, ...], list[list[int]]]:
    """Tensors in the kernel's dtypes: steps, lows, left and right factor; only the last may be narrow.

    And by layer: addresses of left and right factor, ranks, columns of a row, the kind of the right one.
    """
    steps = None if launch.steps is None else launch.steps.float()
    lows = None if launch.lows is None else launch.lows.float()
    count, factors = launch.target.shape[0], launch.factors
    if factors is None:
        return (steps, lows), [[0] * count] * 5
    left, right = floats(factors.left).to("cpu").contiguous(), floats(factors.right).to("cpu").contiguous()
    left = left.float()
    columns: list[list[int]] = []
    for side in (left, right):
        first, size = side.data_ptr(), side.element_size()
        columns.append([first + start * size for start in factors.starts[:-1]])
    form = [[left.shape[1]] * count, [_KINDS[right.dtype]] * count]
    return (steps, lows, left, right), [*columns, list(factors.ranks), *form]


def _layers(tensor: torch.Tensor, count: int) -> list[int]:
    """The address of each of ``count`` layers of a tensor along its first axis."""
    first, step = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
    return list(range(first, first + step * count, step)) if step else [first] * count
