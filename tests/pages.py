"""The pages of the documentation, their blocks of code, and the commands they name.

A comment in front of a block says how it runs: ``<!-- first … -->`` holds Python that a reader would have run
before it, ``<!-- compiled: REASON -->`` keeps a block from running, because of what it needs.
A block ``text`` right behind a block ``python`` is what that prints; ``...`` stands for whatever differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

TOP = Path(__file__).parents[1]
PAGES = [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted(TOP.glob("docs/**/*.md"))]
NAMES = [page.relative_to(TOP).as_posix() for page in PAGES]

_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_COMMAND = re.compile(
    r"(?:^|[\s`(/])(kamera|python -m lab|python examples)(?=[ ./])(?! serves on| import)([^`\n#]*)"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, the line where that begins, and the comments right in front of it."""

    language: str
    text: str
    line: int
    comments: tuple[str, ...] = ()
    prints: str | None = None

    @property
    def first(self) -> str:
        """Python that runs before the block."""
        return "".join(each.removeprefix("first") for each in self.comments if each.startswith("first"))

    @property
    def compiled(self) -> str | None:
        """The reason why it is compiled and not run."""
        reasons = [
            each.removeprefix("compiled:").strip() for each in self.comments if each[:9] == "compiled:"
        ]
        return reasons[0] if reasons else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    comments: list[str] = []
    last = ""
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            comments += [said.strip() for said in _COMMENT.findall(token.content)]
        elif token.type == "fence":
            start = token.map[0] + 2 if token.map else 0
            if token.info == "text" and last == "fence" and found[-1].language == "python":
                shown = found.pop()
                found.append(Block(shown.language, shown.text, shown.line, shown.comments, token.content))
            else:
                found.append(Block(token.info, token.content, start, tuple(comments)))
            comments = []
        else:
            comments = []
        last = token.type
    return found


def commands(page: Path) -> Iterator[str]:
    """``kamera …``, ``python -m lab…`` and ``python examples…`` in blocks and in code between backticks."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        inline = [child.content for child in token.children or [] if child.type == "code_inline"]
        for line in (
            token.content.splitlines() if token.type == "fence" and token.info != "python" else inline
        ):
            for match in _COMMAND.finditer(f" {line}"):
                # what follows two spaces or a bar says something else
                yield re.split(r"  | [|·] ", match[1] + match[2])[0].strip()
