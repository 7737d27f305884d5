"""MMLongBench-Doc: questions about long documents, a unit a page.

``samples.json`` (in the folder or in ``data/``), and the pages as PNG in ``pages/`` or ``tmp/``, named
``DOCUMENT_PAGE.png`` from page 1, as the benchmark's own run renders them from ``documents/*.pdf``.
"""

from __future__ import annotations

import ast
import glob
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kamera.errors import KameraError, TaskDataError
from kamera.eval.reuse.item import LEAST
from kamera.eval.tasks.sample import Picture, Problem, TaskSample
from kamera.eval.tasks.set_files import find_in_set, read_json

UNANSWERABLE = "Not answerable"


def read(data: Path, units: int) -> Iterator[TaskSample | Problem]:
    """Items of the pages with the evidence and their neighbours, ``units`` in all, in the document's order.

    Raises TaskDataError without annotations.
    """
    file = find_in_set(data, ["samples.json"], "MMLongBench-Doc")
    for number, record in enumerate(read_json(file, list)):
        try:
            yield _item(data, record, number, max(units, LEAST))
        except (KameraError, KeyError, TypeError, ValueError, SyntaxError) as error:
            yield Problem(f"{file}:record {number}", f"{type(error).__name__}: {error}")


def _item(data: Path, record: Mapping[str, Any], number: int, units: int) -> TaskSample:
    pages = _pages(data, record["doc_id"])
    evidence = sorted(int(page) for page in _parse_list(record["evidence_pages"]))
    chosen = _around(evidence, sorted(pages), units)
    return TaskSample(
        id=f"{number}/{record['doc_id']}",
        task=record["doc_type"],
        parts=tuple(Picture(pages[page], caption=f"Page {page}.\n") for page in chosen),
        question=f"{record['question']}\nAnswer with the shortest possible phrase. If the pages do not tell, "
        f"answer “{UNANSWERABLE}”.",
        answer=record["answer"],
        meta={"rule": "document", "answer_format": str(record["answer_format"]), "max_new_tokens": 32},
    )


def _pages(data: Path, document: str) -> dict[int, Path]:
    """The pages of a document by number. Raises TaskDataError without any."""
    stem = re.sub(r"\.pdf$", "", document).split("/")[-1]
    for folder in (data / "pages", data / "tmp", data / "data" / "pages"):
        found = {}
        for path in folder.glob(f"{glob.escape(stem)}_*.png"):
            if match := re.fullmatch(re.escape(stem) + r"_(\d+)", path.stem):
                found[int(match[1])] = path
        if found:
            return found
    raise TaskDataError(
        f"no pages of {document}: render them to {data / 'pages'}/{stem}_1.png, … (144 dpi in the "
        "benchmark's own run)"
    )


def _around(evidence: list[int], pages: list[int], units: int) -> list[int]:
    """The evidence and the pages nearest to it, ``units`` at most, in order."""
    if missing := sorted(set(evidence) - set(pages)):
        raise TaskDataError(f"evidence page {missing[0]} is not among the {len(pages)} rendered pages")
    if len(evidence) > units:
        raise TaskDataError(f"{len(evidence)} evidence pages do not fit a window of {units}")
    near = sorted((min((abs(page - e) for e in evidence), default=page), page) for page in pages)
    return sorted(page for _, page in near[:units])


def _parse_list(value: Any) -> list[Any]:
    return list(ast.literal_eval(value) if isinstance(value, str) else value)
