"""Every page does what it says: its Python runs in page order and prints what stands behind it, and the
commands and names that it tells are there.

A page's blocks share one fresh namespace, as if pasted into a new interpreter. A block ``text`` right behind
a block ``python`` is its output; ``...`` stands for what differs. ``<!-- needs: … -->`` in front of a block
names what it cannot run without: it is compiled only. A page with ``kamera serve testbed`` has a server.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import functools
import importlib
import importlib.util
import inspect
import io
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from markdown_it import MarkdownIt
from typer.main import get_command

import kamera
from kamera import ReusePolicy
from kamera.cli.app import app
from tests.serve.rig import serving

TOP = Path(__file__).parents[1]
README = TOP / "README.md"
GUIDES = [README, *sorted(TOP.glob("docs/*.md"))]
PAGES = [*GUIDES, TOP / "CONTRIBUTING.md", TOP / "CHANGELOG.md", TOP / "docs/results/README.md"]
QUICK = ("README.md", "docs/index.md", "docs/limits.md", "docs/vllm.md")
"""Pages whose blocks run by default; those of the others run with ``-m slow``."""
ROOMS = ["kamera", *(f"kamera.{path.parent.name}" for path in sorted(TOP.glob("kamera/*/__init__.py")))]
FOREIGN = {
    *(
        "ChatOpenAI",
        "OpenAIChatModel",
        "OpenAIServerModel",
        "H",
        "KV",
        "R",
        "AutoProcessor",
        "AutoModelForImageTextToText",
    ),
    *("kamera.session_id", "kamera.dropped"),  # fields of requests and answers
}
"""Names of other libraries, of JSON and of mathematics."""

THEIRS = {"--attention-backend", "--compilation-config", "--enable-prompt-tokens-details"}
"""Options of vLLM."""

_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_COMMAND = re.compile(
    r"(?:^|[\s`(/])(kamera(?= )|python -m \w+|python examples(?=/))(?! serves on)([^`\n#]*)"
)
_LOCAL = "http://127.0.0.1:8000"


def named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=page.relative_to(TOP).as_posix()) for page in pages]


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, the line where it begins, what it prints and what it needs."""

    language: str
    text: str
    line: int
    prints: str | None = None
    needs: str | None = None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    needs, last = None, ""
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            said = [each.strip() for each in _COMMENT.findall(token.content)]
            needs = next((each[6:].strip() for each in said if each.startswith("needs:")), None)
        elif token.type == "fence" and token.info == "text" and last == "python":
            shown = found.pop()
            found.append(Block(shown.language, shown.text, shown.line, token.content, shown.needs))
        elif token.type == "fence":
            found.append(Block(token.info, token.content, token.map[0] + 2 if token.map else 0, None, needs))
            needs = None
        last = token.info if token.type == "fence" else ""
    return found


def code_spans(page: Path) -> list[str]:
    """What stands between backticks in running text and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return [
        child.content for token in tokens for child in token.children or [] if child.type == "code_inline"
    ]


def commands(page: Path) -> Iterator[str]:
    """``kamera …``, ``python -m …`` and ``python examples…`` in blocks of shell and between backticks."""
    shell = [line for block in blocks(page) if block.language == "bash" for line in block.text.splitlines()]
    for line in [*shell, *code_spans(page)]:
        for match in _COMMAND.finditer(f" {line}"):
            yield re.split(r"  | [|·&] ", match[1] + match[2])[0].strip(" .,:;)")


@contextlib.contextmanager
def _server_of(page: Path) -> Iterator[str]:
    """The address of the server that a page starts, on a free port of this process."""
    if not any(block.language == "bash" and "kamera serve testbed" in block.text for block in blocks(page)):
        yield _LOCAL
        return
    with serving(policy=ReusePolicy.exact(), keys={}) as served:
        yield served.url


def _run(block: Block, page: Path, names: dict[str, Any], address: str) -> str:
    text = block.text.replace(_LOCAL, address)
    code: Any = compile(ast.increment_lineno(ast.parse(text), block.line - 1), str(page), "exec")
    if block.needs is not None:
        assert block.needs, f"{page}:{block.line} does not say what it needs"
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    if block.prints is not None:
        checker, example = doctest.OutputChecker(), doctest.Example(block.text, block.prints)
        if not checker.check_output(block.prints, printed.getvalue(), _SHOWN):
            difference = checker.output_difference(example, printed.getvalue(), _SHOWN)
            return f"{page.relative_to(TOP)}:{block.line} prints otherwise\n{difference}"
    return ""


def _with_code() -> list[Any]:
    pages = [page for page in GUIDES if any(block.language == "python" for block in blocks(page))]
    return [
        pytest.param(
            page,
            id=page.relative_to(TOP).as_posix(),
            marks=[] if page.relative_to(TOP).as_posix() in QUICK else [pytest.mark.slow],
        )
        for page in pages
    ]


@pytest.mark.parametrize("page", _with_code())
def test_the_blocks_of_a_page_run_in_a_fresh_namespace_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with _server_of(page) as address:
        python = [block for block in blocks(page) if block.language == "python"]
        differences = [difference for block in python if (difference := _run(block, page, names, address))]
    assert python and differences == []


@pytest.mark.parametrize("page", named(PAGES))
def test_the_shell_understands_every_block_of_a_page(page):
    for block in blocks(page):
        if block.language == "bash":
            read = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert (read.returncode, read.stderr) == (0, ""), f"{page}:{block.line}"


@pytest.mark.parametrize("page", named(PAGES))
def test_every_command_that_a_page_names_is_there_with_its_options(page):
    missing = [(command, _missing(command)) for command in commands(page)]
    assert [(command, what) for command, what in missing if what] == []


def _missing(command: str) -> str:
    """The module, file, verb or option that a command names and that is not there; "" if all are."""
    program, *words = command.split()
    if program == "python" and words[0] == "-m":
        theirs = words[1].split(".")[0] not in ("kamera", "benchmarks", "lab", "tests")
        return "" if theirs or importlib.util.find_spec(words[1]) else words[1]
    if program == "python":
        return "" if (TOP / words[0]).is_file() else words[0]
    return _missing_of_verb(words)


def _missing_of_verb(words: list[str]) -> str:
    """``words`` begin with verbs of the program; the options among them are the verb's."""
    command: Any = get_command(app)
    while hasattr(command, "list_commands") and words:
        if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return ""  # `kamera VERB --help`
        verb = words.pop(0)
        command = command.get_command(None, verb)
        if command is None:
            return verb
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words))
    return next((option for option in options if option not in known), "")


def _options(command: Any) -> set[str]:
    """The options of a command and of all below it."""
    found = {option for parameter in command.params for option in parameter.opts}
    verbs = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return found.union({"--help"}, *(_options(command.get_command(None, verb)) for verb in verbs))


@pytest.mark.few(12)
@pytest.mark.parametrize("page", named(GUIDES))
def test_every_option_that_a_page_explains_is_there(page):
    known = _options(get_command(app)) | THEIRS
    told = {found[0] for span in code_spans(page) if (found := re.match(r"--[a-z][a-z-]*", span))}
    assert sorted(told - known) == []


@functools.cache
def _public() -> dict[str, Any]:
    """Public names of all rooms and of modules in them, by name alone."""
    found: dict[str, Any] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            found.setdefault(name, getattr(module, name))
    for name in (
        "edits.policies",
        "engines.hf",
        "ops.kernels",
        "store.metrics",
        "testbed.benchmarks",
        "errors",
    ):
        module = importlib.import_module(f"kamera.{name}")
        found |= {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return found


def _members(value: Any) -> set[str]:
    """Attributes, fields and names of parameters of a class."""
    fields = {name for base in getattr(value, "__mro__", ()) for name in getattr(base, "__annotations__", {})}
    return {*dir(value), *fields}


@functools.cache
def _callables() -> set[str]:
    """Public functions and classes, and the methods of classes."""
    classes = [value for value in _public().values() if inspect.isclass(value)]
    return {*_public(), *(name for value in classes for name in _members(value)), *dir(builtins)}


def _is_there(name: str) -> bool:
    """Whether a dotted name of ours, ``Class.member`` or the name of a call exists."""
    first, *rest = name.split(".")
    if first == "kamera":
        value: Any = kamera
        for index, part in enumerate(rest):
            if isinstance(value, ModuleType) and not hasattr(value, part):
                with contextlib.suppress(ImportError):
                    importlib.import_module(".".join([first, *rest[: index + 1]]))
            if not hasattr(value, part):
                return part in _members(value)
            value = getattr(value, part)
        return True
    if rest and inspect.isclass(_public().get(first)):
        return rest[0] in _members(_public()[first])
    return first in _callables()


def _name_in(span: str) -> str | None:
    """The name in a code span, if it is one of those that are looked up."""
    match = re.match(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", span)
    if match is None or re.fullmatch(r"kamera[.\w-]*\.v\d+|kamera-.*|kamera_.*", span):
        return None
    name, rest = match[0], span[match.end() :]
    is_member = "." in name and inspect.isclass(_public().get(name.split(".")[0]))
    is_call = rest.startswith("(") and "." not in name
    return name if name.startswith("kamera.") or is_member or is_call else None


@functools.cache
def _files() -> set[str]:
    folders = ("kamera", "benchmarks", "tests", "examples")
    return {path.name for folder in folders for path in (TOP / folder).rglob("*.py")}


@pytest.mark.parametrize("page", named([page for page in PAGES if page.parent.name != "results"]))
def test_every_name_that_a_page_tells_is_there(page):
    wrong = []
    for span in code_spans(page):
        name = _name_in(span)
        if re.fullmatch(r"[\w/]+\.py", span):
            wrong += [] if span.rpartition("/")[2] in _files() else [span]
        elif name is not None and name not in FOREIGN and not _is_there(name):
            wrong.append(span)
    assert wrong == []


def test_every_page_that_the_code_refers_to_is_there():
    """Docstrings and messages send a reader to ``docs/….md``."""
    texts = {path: path.read_text(encoding="utf-8") for path in (TOP / "kamera").rglob("*.py")}
    told = {
        (path.name, page) for path, text in texts.items() for page in re.findall(r"docs/[\w/-]+\.md", text)
    }
    assert sorted((name, page) for name, page in told if not (TOP / page).is_file()) == []


def test_whatever_names_the_distribution_names_ours():
    """On the package index ``kamera`` is somebody else's."""
    settings = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^name = "(.*)"$', settings, re.MULTILINE)[0] == "kamera-kv"
    folders = ("kamera", "benchmarks", "examples", "docs", "tests/servers", ".ci")
    files = [path for folder in folders for path in (TOP / folder).rglob("*")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".md")}
    texts |= {path: path.read_text(encoding="utf-8") for path in [TOP / "pyproject.toml", *TOP.glob("*.md")]}
    assert sum("kamera-kv" in text for text in texts.values()) > 10
    extras = "|".join(re.findall(r"^([a-z0-9]+) = \[", settings, re.MULTILINE))
    installed = r"pip install[^\n&`]*[ '\"/]kamera(?=[ '\"`\[=<>~]|$)"
    foreign = re.compile(rf"{installed}|(?<![\w-])kamera\[(?:{extras}|\{{)", re.MULTILINE)
    assert [(str(path), found[0]) for path, text in texts.items() if (found := foreign.search(text))] == []


def test_the_pages_are_few_and_short():
    pages = sorted(TOP.glob("docs/**/*.md"))
    assert 12 <= len([page for page in pages if page.parent.name == "docs"]) <= 14
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 25_000
