"""The site of the documentation builds without a warning, and no link in it is broken."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

TOP = Path(__file__).parents[1]
_PAGES = {page.relative_to(TOP / "docs").as_posix() for page in TOP.glob("docs/**/*.md")}
_ROOMS = ["kamera", *(f"kamera.{path.parent.name}" for path in sorted(TOP.glob("kamera/*/__init__.py")))]
_ROOMS += ["kamera.engines.hf", "kamera.edits.policies", "kamera.ops.kernels", "kamera.window.view"]
_ROOMS.remove("kamera.cli")
"""Modules with public names; those of the program are its verbs."""


def _settings() -> dict[str, Any]:
    return yaml.safe_load((TOP / "mkdocs.yml").read_text(encoding="utf-8"))


def _leaves(nav: Any) -> list[str]:
    """The pages that stand in a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [leaf for each in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(each)]


def test_every_page_stands_in_the_navigation_once():
    assert sorted(_leaves(_settings()["nav"])) == sorted(_PAGES)


@pytest.mark.parametrize("page", sorted(_PAGES))
def test_the_first_line_of_a_page_says_what_a_reader_can_do_afterwards(page):
    _, first, *_ = (TOP / "docs" / page).read_text(encoding="utf-8").split("\n\n")
    assert first.startswith("After this page"), first


class _Links(HTMLParser):
    """What a page links to and loads, and the places in it that can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given.get("href", ""))
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site, in a folder of its own."""
    missing = [name for name in ("zensical", "mkdocstrings") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is missing: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("documentation")
    shutil.copy(TOP / "mkdocs.yml", folder)
    shutil.copytree(TOP / "docs", folder / "docs")
    (folder / "kamera").symlink_to(TOP / "kamera")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def _read(site: Path) -> dict[Path, _Links]:
    pages = {}
    for file in site.glob("**/*.html"):
        pages[file] = _Links()
        pages[file].feed(file.read_text(encoding="utf-8"))
    return pages


@pytest.mark.slow
def test_no_link_of_the_site_is_broken_and_nothing_is_loaded_from_elsewhere(site):
    pages = _read(site)
    assert len(pages) > len(_PAGES)
    wrong = defaultdict(set)
    for page, found in pages.items():
        if page.name == "404.html":
            continue  # its links begin at the top of a server
        for link in [*found.links, *found.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in found.loads and parts.scheme != "data":
                    wrong[page.name].add(link)
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (parts.fragment and target in pages and _misses(pages[target], parts)):
                wrong[page.name].add(link)
    assert not wrong, dict(wrong)
    for sheet in site.glob("**/*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def _misses(page: _Links, parts: Any) -> bool:
    return unquote(parts.fragment) not in page.places


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    places = {place for page in _read(site).values() for place in page.places}
    missing = []
    for room in _ROOMS:
        module = importlib.import_module(room)
        for name in {*getattr(module, "__all__", ())} - {"__version__"}:
            value = getattr(module, name)
            # a function that its module bears the name of, or that another room defines, stands where it is
            where = {f"{room}.{name}", f"{getattr(value, '__module__', '')}.{name}"}
            if not isinstance(value, ModuleType) and not where & places:
                missing.append(f"{room}.{name}")
    assert missing == []
