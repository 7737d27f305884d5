"""The index entry of an object: what a query selects by, and the whole of it as signed text."""

from __future__ import annotations

import json
from typing import Any

import cattrs

from kamera.errors import KameraError
from kamera.store.codec import Codec
from kamera.store.fields import canonical_json
from kamera.store.info import ObjectInfo, Weighed
from kamera.store.keys import Context

SCHEMA = 12
FIELDS = Weighed._fields[:-2]
"""What is counted and searched by; uses are in a table of their own."""
COLUMNS = ", ".join((*FIELDS, "said", "signature"))
TABLES = f"""
CREATE TABLE objects ({COLUMNS}, PRIMARY KEY (key)) WITHOUT ROWID;
CREATE INDEX by_chunk ON objects (chunk_id, tenant, created, key);
CREATE INDEX by_age ON objects (tenant, created, key);
CREATE INDEX by_kind ON objects (tenant, kind, bytes);
CREATE INDEX by_context ON objects (kind, anchor, fingerprint, tenant, kv) WHERE kind = 'canonical';
CREATE TABLE uses (key PRIMARY KEY, uses, used) WITHOUT ROWID;
CREATE TABLE sent (key PRIMARY KEY, stamp) WITHOUT ROWID;
"""
INSERT = f"INSERT OR REPLACE INTO objects VALUES ({', '.join('?' * (len(FIELDS) + 2))})"
WEIGHED = f"SELECT {', '.join(FIELDS)}, COALESCE(uses, 0), used FROM objects LEFT JOIN uses USING (key)"
_CONVERTER = cattrs.Converter(detailed_validation=False)
_IDS = ("chunk_id", "fingerprint", "anchor", "tenant", "kv", "base")

Stamped = tuple[ObjectInfo, str]
"""An object, and the stamp of the file it was read from."""


def row_of(info: ObjectInfo, stamp: str, codec: Codec) -> tuple[Any, ...]:
    """The row of an object; ids are sealed as ``codec`` says, so that equal ones can be searched."""
    plain = Weighed.of(info)._replace(stamp=stamp)
    fields = {name: getattr(plain, name) for name in FIELDS}
    ids = {name: codec.seal_id(fields[name]) for name in _IDS if fields[name] or name != "base"}
    row = (*(fields | ids).values(), codec.seal_id(canonical_json(_CONVERTER.unstructure(info))))
    return (*row, codec.sign(json.dumps(row)))


def read_row(row: tuple[Any, ...], codec: Codec) -> Stamped | None:
    """The inverse of `row_of`; None for a row that it did not make."""
    *fields, sealed_info, signature = row
    try:
        if codec.sign(json.dumps(row[:-1])) != signature:
            return None
        columns = Weighed(*fields)
        return _CONVERTER.structure(json.loads(codec.open_id(sealed_info)), ObjectInfo), columns.stamp
    except (KameraError, AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def columns_of(context: Context, codec: Codec) -> dict[str, str]:
    """The columns of a context as they are searched; there is none for its origin."""
    return {name: codec.seal_id(value) for name, value in vars(context).items() if name != "origin"}
