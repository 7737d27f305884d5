"""The index entry of an object: one row, with a digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kamera.ops import FactorSize, PatchBudget, Proof
from kamera.store.info import ObjectInfo
from kamera.store.keys import Context

SCHEMA = 6
TABLES = """
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, chunk_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL, anchor TEXT NOT NULL, tenant TEXT NOT NULL,
    antecedents TEXT NOT NULL, tokens INTEGER NOT NULL, rank INTEGER, formed TEXT,
    bytes INTEGER NOT NULL, created REAL NOT NULL, stamp TEXT NOT NULL, kv TEXT NOT NULL,
    formed_under TEXT NOT NULL, base TEXT NOT NULL, behind INTEGER NOT NULL, mac TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uses (
    key TEXT PRIMARY KEY, uses REAL NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, changed INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent (name TEXT PRIMARY KEY, stamp TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_chunk ON objects (chunk_id, tenant, created, key);
CREATE INDEX IF NOT EXISTS by_age ON objects (tenant, created, key);
CREATE INDEX IF NOT EXISTS by_kind ON objects (tenant, kind, bytes);
"""
COLUMNS = (
    "key, kind, chunk_id, fingerprint, anchor, tenant, antecedents, tokens, rank, formed, bytes, "
    "created, stamp, kv, formed_under, base, behind, mac"
)
INSERT = f"INSERT OR REPLACE INTO objects ({COLUMNS}) VALUES ({', '.join('?' * 18)})"

Stamped = tuple[ObjectInfo, str]
"""A row: the object, and the stamp of the file it was read from."""


class RowCodec:
    """Converts objects to rows and back. ``veil``, ``unveil`` and ``sign`` are the store's (`Codec`)."""

    def __init__(
        self, veil: Callable[[str], str], unveil: Callable[[str], str], sign: Callable[[str], str]
    ) -> None:
        self.veil = veil
        self.unveil = unveil
        self._sign = sign

    def signed(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """``row`` with its digest appended."""
        return (*row, self._sign(json.dumps(row)))

    def is_ours(self, row: tuple[Any, ...]) -> bool:
        """True if a row with its digest was written by this store."""
        try:
            return bool(self.signed(row[:-1]) == row)
        except (TypeError, ValueError):
            return False

    def of(self, info: ObjectInfo, stamp: str) -> tuple[Any, ...]:
        """The row of an object."""
        context, proof = info.context, info.proof and info.proof.to_info()["proof"]
        row = (
            info.key,
            info.kind,
            self.veil(info.chunk_id),
            self.veil(context.fingerprint),
            self.veil(context.anchor),
            self.veil(context.tenant),
            json.dumps([self.veil(chunk) for chunk in info.antecedents]),
            info.tokens,
            info.rank,
            info.formed,
            info.bytes,
            info.created,
            stamp,
            self.veil(context.kv),
            json.dumps([info.budget and info.budget.to_info(), info.orderings, info.sizes, proof]),
            info.base and self.veil(info.base),
            info.behind,
        )
        return self.signed(row)

    def read(self, row: tuple[Any, ...]) -> Stamped:
        """The object of a row that `is_ours`."""
        key, kind, chunk, fingerprint, anchor, tenant, antecedents, tokens, rank, formed = row[:10]
        budget, orderings, sizes, proof = json.loads(row[14])
        info = ObjectInfo(
            key=key,
            kind=kind,
            chunk_id=self.unveil(chunk),
            context=Context(*map(self.unveil, (fingerprint, anchor, tenant, row[13]))),
            antecedents=tuple(map(self.unveil, json.loads(antecedents))),
            tokens=tokens,
            rank=rank,
            formed=formed,
            bytes=row[10],
            created=row[11],
            budget=None if budget is None else PatchBudget.from_info(budget, 1),
            orderings=orderings,
            base=row[15] and self.unveil(row[15]),
            behind=row[16],
            sizes=tuple(FactorSize(*size) for size in sizes),
            proof=Proof.from_info({"proof": proof}),
        )
        return info, row[12]
