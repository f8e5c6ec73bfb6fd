"""A short storm on each database: half of the faults each, the long ones shortened. `make chaos` is the whole of it."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults import FAULTS, Fault
from tests.processes import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]


@pytest.mark.parametrize("database,half", [("sqlite", FAULTS[::2]), ("postgresql", FAULTS[1::2])])
def test_in_a_storm_nothing_is_lost_and_nothing_doubled(database: str, half: tuple[Fault, ...]) -> None:
    names = ",".join(fault.__name__ for fault in half)
    storm = subprocess.run(
        [sys.executable, "-m", "tests.storm"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "DATABASE": database, "SEED": "1", "SCALE": "0.1", "FAULTS": names})
    assert storm.returncode == 0, storm.stdout[:20_000] + storm.stderr[-5_000:]
    head, row = (line.strip("| ").split(" | ") for line in storm.stdout.split("| database ")[1].splitlines()[0:3:2])
    told = dict(zip(["database", *head[-len(row) + 1:]], row))
    assert told["lost"] == told["run twice"] == told["doubled effects"] == "0"
    assert int(told["finished"]) == int(told["acknowledged"]) > 100 and "the doctor agrees" in storm.stdout


def test_a_storm_that_cannot_be_made_says_why() -> None:
    for name, value in (("FAULTS", "an earthquake"), ("DATABASE", "oracle"), ("SEED", "x")):
        storm = subprocess.run([sys.executable, "-m", "tests.storm"], cwd=ROOT, capture_output=True, text=True,
                               env={**os.environ, name: value})
        assert storm.returncode == 2 and "Traceback" not in storm.stderr
