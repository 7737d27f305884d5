"""The file of a measurement (a certificate): JSON that states its format and its own digest."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kamera.errors import InvalidCertificate, StoreError
from kamera.files import published


@dataclass(frozen=True)
class MeasuredFile:
    """Files of one ``kind`` ("certificate") and version of the format.

    ``remedy`` ends a message about a bad file: how to make a new one. The digest detects damage and edits by
    hand. It is no signature: anyone who may write to the directory may make one.
    """

    kind: str
    format: int
    remedy: str

    def write(self, path: Path, content: Any) -> Path:
        """Write ``content`` atomically, in a directory that is created if missing; returns ``path``.

        Raises StoreError if the operating system refuses.
        """
        document = {"format": self.format, "sha256": _digest(content), self.kind: content}
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with published(path, 0o666) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(f"the {self.kind} cannot be written to {str(path.parent)!r}: {error}") from None
        return path

    def read(self, path: str | os.PathLike[str]) -> Any:
        """The content. Raises InvalidCertificate for a missing file, another format, damage or an edit."""
        where = repr(str(path))
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            form, seal, content = document["format"], document["sha256"], document[self.kind]
        except FileNotFoundError:
            raise InvalidCertificate(f"no {self.kind} at {where}: {self.remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.invalid(where, f"{type(error).__name__}: {error}") from None
        if form != self.format:
            raise InvalidCertificate(
                f"{where} is of {self.kind} format {form!r}, this version reads {self.format}: {self.remedy}"
            )
        if seal != _digest(content):
            raise InvalidCertificate(
                f"{where} was changed after it was written: its digest does not match; {self.remedy}"
            )
        return content

    def invalid(self, where: str, why: str) -> InvalidCertificate:
        """The error for a file (named as it is to be shown) whose content is not of this kind."""
        return InvalidCertificate(f"{where} is no {self.kind} ({why}): {self.remedy}")


def _digest(content: Any) -> str:
    # as JSON gives it back, so that what is written and what is read have one digest
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()
