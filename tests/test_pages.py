"""Every block of code of README and docs runs as it stands, and prints what the page says."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib.util
import io
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import kamera
from kamera import Backbone, ChunkStore, ReusePolicy, testbed
from kamera.cli.app import app
from tests.pages import NAMES, PAGES, TOP, Block, blocks, commands
from tests.serve.rig import serving

_STAGED = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
_SPOKEN = [page for page in PAGES if "results" not in page.relative_to(TOP).parts]
"""Pages whose commands are those of today; results tell the commands that were run."""
_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@functools.cache
def _backbone() -> Backbone:
    return Backbone(*testbed.load())


@functools.cache
def _frames() -> tuple[Any, ...]:
    return tuple(frame.image for frame in testbed.World(seed=0).episode(0, legends=3).frames)


def _stage() -> dict[str, Any]:
    """Names that a block may use beside those of the blocks before it."""
    frames = list(_frames())
    return {
        **{name: getattr(kamera, name) for name in kamera.__all__},
        "backbone": _backbone(),
        "store": ChunkStore.open("memory://"),
        "frames": frames,
        "messages": [
            {"role": "system", "content": "You use a computer."},
            {
                "role": "user",
                "content": [{"type": "image", "image": frames[0]}, {"type": "text", "text": "?"}],
            },
        ],
    }


def _is_whole(page: Path) -> bool:
    """Whether its blocks are a program by themselves, which a reader copies as it is."""
    return page.name in ("README.md", "index.md", "start.md") or page.parent.name == "tutorials"


@contextlib.contextmanager
def _server_of(page: Path) -> Iterator[str]:
    """The address of the server that a page starts, on a free port of this process."""
    if not any(block.language == "bash" and "kamera serve testbed" in block.text for block in blocks(page)):
        yield "http://127.0.0.1:8000"
        return
    with serving(policy=ReusePolicy.balanced(), keys={}) as served:
        yield served.url


def _compiled(text: str, page: Path, line: int) -> Any:
    """Code whose errors name the page and its line."""
    return compile(ast.increment_lineno(ast.parse(text), line - 1), str(page), "exec")


def _run(block: Block, page: Path, names: dict[str, Any]) -> None:
    exec(_compiled(block.first, page, 1), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(_compiled(block.text, page, block.line), names)
    if block.prints is not None:
        checker, example = doctest.OutputChecker(), doctest.Example(block.text, block.prints)
        if not checker.check_output(block.prints, printed.getvalue(), _SHOWN):
            where = f"{page.relative_to(TOP)}:{block.line} prints otherwise"
            pytest.fail(f"{where}\n{checker.output_difference(example, printed.getvalue(), _SHOWN)}")


@pytest.mark.parametrize("page", _STAGED, ids=lambda page: page.relative_to(TOP).as_posix())
def test_the_blocks_of_a_page_run_one_after_another_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # as for a user: nobody has certified the model
    monkeypatch.setenv("KAMERA_CERTIFIED", "1")
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path / "none"))
    names = {} if _is_whole(page) else _stage()
    with _server_of(page) as address:
        for block in blocks(page):
            if block.language == "python" and block.compiled is None:
                _run(replace(block, text=block.text.replace("http://127.0.0.1:8000", address)), page, names)
            elif block.language == "python":
                assert block.compiled, f"{page}:{block.line} gives no reason"
                _compiled(block.text, page, block.line)


def test_whatever_names_the_distribution_names_ours():
    """On the package index ``kamera`` is somebody else's."""
    settings = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^name = "(.*)"$', settings, re.MULTILINE)[0] == "kamera-kv"
    folders = ("kamera", "benchmarks", "examples", "docs", ".ci")
    files = [path for folder in folders for path in (TOP / folder).rglob("*")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".md")}
    texts |= {path: path.read_text(encoding="utf-8") for path in [TOP / "pyproject.toml", *TOP.glob("*.md")]}
    assert sum("kamera-kv" in text for text in texts.values()) > 10
    installed = r"pip install[^\n&`]*[ '\"/]kamera(?=[ '\"`\[=<>~]|$)"
    foreign = re.compile(installed + r"|['\"`/]kamera\[[a-z{][a-z0-9,}]*\]['\"`]", re.MULTILINE)
    assert [(str(path), found[0]) for path, text in texts.items() if (found := foreign.search(text))] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_shell_understands_every_block_of_a_page(page):
    for block in blocks(page):
        if block.language == "bash":
            read = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert (read.returncode, read.stderr) == (0, ""), f"{page}:{block.line}"


@pytest.mark.parametrize("page", _SPOKEN, ids=lambda page: page.relative_to(TOP).as_posix())
def test_every_command_that_a_page_names_is_there_with_its_options(page):
    missing = [(command, _missing(command)) for command in commands(page)]
    assert [(command, what) for command, what in missing if what] == []


def _missing(command: str) -> str:
    """The module, file, verb or option that a command names and that is not there; "" if all are."""
    program, *words = command.split()
    if program == "python" and words[0] == "-m":
        return "" if importlib.util.find_spec(words[1].rstrip(".:,;)")) else words[1]
    if program == "python":
        return "" if (TOP / words[0]).is_file() else words[0]
    return _missing_of_verb(words)


def _missing_of_verb(words: list[str]) -> str:
    """``words`` begin with verbs of the program; the options among them are the verb's."""
    command: Any = get_command(app)
    while hasattr(command, "list_commands") and words:
        if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return ""  # `kamera store …`
        verb = words.pop(0)
        command = command.get_command(None, verb)
        if command is None:
            return verb
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words))
    return next((option for option in options if option not in known), "")
