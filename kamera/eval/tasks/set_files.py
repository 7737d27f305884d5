"""Files of published sets: JSON documents and lines, and parquet files row by row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from kamera.errors import TaskDataError
from kamera.eval.tasks.sample import Problem

_BATCH = 16  # rows in memory at once: a MuirBench row holds its pictures


def read_json(path: Path, kind: type, mend: str = "download it again") -> Any:
    """A JSON document that is a ``kind`` (list or dict).

    Raises TaskDataError for others, with the line and how to ``mend`` it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TaskDataError(f"{path}:{error.lineno}: broken JSON ({error.msg}): {mend}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise TaskDataError(f"{path}: not readable ({error}): {mend}") from None
    if not isinstance(value, kind):
        raise TaskDataError(f"{path}: a {type(value).__name__}, not a {kind.__name__}: {mend}")
    return value


def find_in_set(data: Path, names: Sequence[str], of: str) -> Path:
    """The first of ``names`` in a set's folder or its ``data``. Raises TaskDataError without any."""
    for path in (root / name for root in (data, data / "data") for name in names):
        if path.exists():
            return path
    raise TaskDataError(f"{data}: no {names[0]} there or in data/: give the {of} folder as published")


def missing_files(files: Mapping[str, Path], chosen: Sequence[str], folder: Path) -> list[Problem]:
    """A problem for each of the ``chosen`` subtasks without a file; one remark on all if none was chosen."""
    absent = [name for name in chosen or files if not files[name].is_file()]
    if chosen:
        return [Problem(str(files[name]), "no such file") for name in absent]
    return [Problem(str(folder), f"not there: {', '.join(absent)}", skipped=False)] if absent else []


def write_json(path: Path, document: Any, indent: int = 4) -> None:
    """Write a JSON document."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Write JSON lines."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index (from 0) and the ``columns`` of every row, streamed.

    Raises TaskDataError for a file that cannot be read, for columns it lacks, and without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise TaskDataError(f"{path}: reading parquet needs pyarrow: pip install 'kamera-kv[eval]'") from None
    try:
        with ParquetFile(path) as file:
            missing = sorted(set(columns) - set(file.schema_arrow.names))
            if missing:
                raise TaskDataError(
                    f"{path}: no column {missing}, it has {file.schema_arrow.names}: "
                    "give the set as published"
                )
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=list(columns)):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise TaskDataError(f"{path}: not a readable parquet file ({error}): download it again") from None


def decode_picture(cell: Any) -> Image.Image:
    """The RGB picture in a Hugging Face image cell ``{"bytes": …, "path": …}``.

    Raises ValueError for other contents, which it names.
    """
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not data:
        raise ValueError(f"no picture bytes ({type(cell).__name__})" if data is None else "an empty picture")
    try:
        with Image.open(BytesIO(data)) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(f"a picture that cannot be read: {error}") from None
