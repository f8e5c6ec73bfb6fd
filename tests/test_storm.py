"""A short storm on each database: half of the faults each, the long ones shortened. `make chaos` is the whole of it."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults import FAULTS
from tests.processes import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]


@pytest.mark.parametrize("database,half", [("sqlite", FAULTS[::2]), ("postgresql", FAULTS[1::2])])
def test_in_a_storm_nothing_is_lost_and_nothing_doubled(database: str, half: tuple) -> None:
    names = ",".join(fault.__name__.replace("_", " ") for fault in half)
    storm = subprocess.run(
        [sys.executable, "-m", "tests.storm"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "DATABASE": database, "FAULTS": names, "SEED": "1", "SCALE": "0.1"})
    assert storm.returncode == 0, storm.stdout[-20_000:] + storm.stderr[-5_000:]
    assert "| 0 |" in storm.stdout and "the doctor agrees" in storm.stdout
