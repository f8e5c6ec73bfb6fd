"""The secrets that callbacks are signed with."""
from __future__ import annotations

import base64
import functools
import os
import secrets
import time
from pathlib import Path

from app.config import check_secret, settings
from app.errors import WrongSetting

_SETTLED_SECONDS = 1.0  # a file may change again within one tick of its clock, and look as it did


def callback_secrets() -> tuple[str, ...]:
    """The signing secrets, newest first. Without any configured, one is made once and kept in `var_dir`.

    Raises WrongSetting, with one line, when the one that is kept cannot be used.
    """
    return settings().callback_secrets or (_kept_secret(settings().var_dir / "callback_secret"),)


def _kept_secret(path: Path) -> str:
    try:
        return _known(path)
    except FileNotFoundError:
        _make(path)
    return _known(path)


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    draft.write_text("whsec_" + base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
    try:
        os.link(draft, path)  # fails when another process was first: theirs stands
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _known(path: Path) -> str:
    """What the file holds; it is read again once it is another one, or has changed. Raises FileNotFoundError."""
    found = os.stat(path)
    if time.time() - found.st_mtime < _SETTLED_SECONDS:
        return _read(path)
    return _read_once(path, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_once(path: Path, *_version: int) -> str:
    return _read(path)


def _read(path: Path) -> str:
    kept = path.read_text(errors="replace").strip()
    try:
        check_secret(kept)
    except ValueError:
        raise WrongSetting(f"{path} holds no secret: put one into it, or delete it, and a new one is made") from None
    return kept
