"""The secrets that callbacks are signed with."""
from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path

from app.config import settings


def callback_secrets() -> tuple[str, ...]:
    """The signing secrets, newest first. Without any configured, one is made once and kept in `var_dir`."""
    return settings().callback_secrets or (_kept_secret(settings().var_dir / "callback_secret"),)


def _kept_secret(path: Path) -> str:
    if not path.exists():
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
    return path.read_text().strip()
