"""A real Chromium that reaches this machine only."""
from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run",
          "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")


def program() -> str:
    """Chromium's path. Without one the test is skipped at home, and fails in CI."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("Chromium is not installed")
    assert found, "Chromium is not installed"
    return found


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The browser, for the time of a test; nothing of it is left."""
    path = program()
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=_FLAGS) as started:
        yield started
