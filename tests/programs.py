"""Programs of the machine that tests need and that no package brings."""
from __future__ import annotations

import os
import shutil

import pytest

_ALSO = "/usr/sbin:/usr/local/sbin"  # where servers are, which not every PATH names


def find(name: str, *commands: str) -> str:
    """The path of the program of this name, or of the first of these commands. Without one the test is skipped at home,
    and fails in CI."""
    path = f"{os.environ['PATH']}:{_ALSO}"
    found = next(filter(None, (shutil.which(each, path=path) for each in commands or (name,))), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip(f"{name} is not installed")
    assert found, f"{name} is not installed"
    return found
