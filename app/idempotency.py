"""Idempotency keys: the first answer to a keyed submission, kept in the same transaction as its job."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, select

from app import jobs, statements
from app.errors import KeyReused
from app.schema import idempotency_keys as keys


@dataclass(frozen=True)
class Record:
    """What a key stands for."""

    fingerprint: str
    job_id: str
    note_id: int | None
    body: str


_columns = (keys.c.fingerprint, keys.c.job_id, keys.c.note_id, keys.c.body)
_find = select(*_columns).where(keys.c.owner == bindparam("of_owner"), keys.c.key == bindparam("of_key"))
_keep = statements.inserts(keys, list(keys.c))


def fingerprint(method: str, path: str, request: Any) -> str:
    """What makes two requests the same: method, path and canonical body. The order of members, spacing and the
    spelling of a number (1, 1.0, 1e0) do not count, as in RFC 8785."""
    canonical = json.dumps(_plain([method, path, request]), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def replay(view: Connection, owner: str, key: str, fingerprint: str) -> Record | None:
    """The first answer under this key, or None when the key is free. Raises KeyReused for another request."""
    row = statements.first(view, _find, {"of_owner": owner, "of_key": key})
    if row is None:
        return None
    record = Record(*row)
    if record.fingerprint != fingerprint:
        raise KeyReused(jobs.path(record.job_id))
    return record


def keeping(tx: Connection, kept: Sequence[tuple[str, str, Record]], now: datetime) -> statements.Asked:
    """What binds keys, each of an owner, to these answers. It raises `sqlalchemy.exc.IntegrityError` when a concurrent
    submission of one was first."""
    return statements.of_all(tx, _keep, [
        {"owner": owner, "key": key, "fingerprint": record.fingerprint, "job_id": record.job_id,
         "note_id": record.note_id, "body": record.body, "created_at": now}
        for owner, key, record in sorted(kept, key=lambda each: each[:2])])  # two that wait for each other never end
