"""Building the CPU kernel: where it is kept, and what stands in when it cannot be built."""

from __future__ import annotations

import os
import shutil
import stat

import pytest
import torch

from kamera.ops import attention_layout, kv_map
from kamera.ops.kernels import native_path as native
from kamera.ops.kernels import serve
from tests.ops.kernel_cases import rope, span

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(native.native_library() is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library as the compiler makes it, once: what follows is about where it is kept."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return native._build(COMPILER)


@pytest.fixture
def copying(library, monkeypatch, tmp_path_factory):
    """A compiler that brings that library, of the real one's version."""
    tools = tmp_path_factory.mktemp("tools")
    version = native._run([COMPILER, "--version"])
    (tools / "version").write_text(version)
    script = f'#!/bin/sh\n[ "$1" = --version ] && exec cat {tools}/version\n'
    script += f'while [ "$1" != -o ]; do shift; done\nexec cp {library} "$2"\n'
    (tools / "cc").write_text(script)
    (tools / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return str(tools / "cc")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library loaded yet, and an empty cache; what was loaded before comes back afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.native_library.cache_clear()
    yield tmp_path
    native.native_library.cache_clear()


def moved() -> tuple[str, bool]:
    """Which path served a span that moves, and whether anything was written."""
    layout = [attention_layout(1, 1, 8, 8, rope(4))]
    into = kv_map(span(layout, 3, torch.float32), torch.zeros_like)
    path = serve(into, span(layout, 3, torch.float32), None, layout, (5,))
    return path, bool(into[0]["k"].any())


@needs_compiler
def test_the_library_is_built_once_in_a_private_directory(fresh, copying):
    assert moved() == ("native", True)
    kept = fresh / "cache" / "kamera" / "kernels"
    (built,) = kept.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) & 0o077 == 0
    made = built.stat().st_mtime_ns
    native.native_library.cache_clear()
    assert moved() == ("native", True)
    assert [(p, p.stat().st_mtime_ns) for p in kept.iterdir()] == [(built, made)]


@pytest.mark.parametrize("why", ["switched off", "no compiler", "it fails", "it makes nonsense"])
def test_without_a_library_torch_serves(fresh, monkeypatch, why):
    tools = fresh / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools) if why != "switched off" else os.environ["PATH"])
    if why == "switched off":
        monkeypatch.setenv("KAMERA_NATIVE", "0")
    elif why != "no compiler":
        script = {
            "it fails": "#!/bin/sh\necho broken >&2\nexit 1\n",
            "it makes nonsense": '#!/bin/sh\nwhile [ $2 ]; do [ "$1" = -o ] && echo x >"$2"; shift; done\n',
        }[why]
        (tools / "cc").write_text(script)
        (tools / "cc").chmod(0o755)
    assert moved() == ("torch", True)
    kept = fresh / "cache" / "kamera" / "kernels"
    assert not list(kept.glob("*.part"))
