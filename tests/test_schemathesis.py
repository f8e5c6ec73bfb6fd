"""Requests made from the OpenAPI document, against real processes: what the document says is so."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, Site

SEED, EXAMPLES, STORIES = 20261130, 30, 50
TOKENS = {"sqlite": "", "postgresql": "ada:secret"}  # so that both an open and a closed service are asked
CALLBACK = "http://127.0.0.1:9/hook"  # nobody listens there

CONFIG = """
base-url = "{url}"
workers = 2
seed = {seed}
continue-on-failure = true
hooks = "tests.schemathesis_hooks"
{token}
[generation]
max-examples = {examples}
database = "none"

[cache]
enabled = false
"""


@pytest.fixture
def desk(request: pytest.FixtureRequest, tmp_path: Path, valkey: Any) -> Any:
    """Web, worker, courier and beat, with a stranger's kind, each database once."""
    settings: dict[str, Any] = {
        "REDIS_URL": valkey.url, "JOB_MODULES": "greenhouse.watering",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/examples",
        "CALLBACK_ALLOW": "127.0.0.1:9", "CALLBACK_SCHEDULE_SECONDS": "0,1,1", "API_TOKENS": TOKENS[request.param]}
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        settings["DATABASE_URL"] = server.url(server.new_database())
    with Site(tmp_path, **settings) as site:
        site.start("web", "worker", "courier", "beat")
        site.wait_ready()
        yield site


def ask(desk: Site, folder: Path, phases: str, examples: int) -> str:
    """Runs schemathesis with every check; fails with what it reports."""
    document, config = folder / "openapi.json", folder / "schemathesis.toml"
    document.write_text(desk.get("/openapi.json").text)
    token = desk.env["API_TOKENS"].partition(":")[2]
    config.write_text(CONFIG.format(
        url=desk.api, seed=SEED, examples=examples,
        token=f'[auth.openapi.bearer]\nbearer = "{token}"\n' if token else ""))
    ran = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", str(document), "--no-color",
         "--checks", "all", "--phases", phases],
        env={**desk.env, "CALLBACK": CALLBACK}, cwd=ROOT, capture_output=True, text=True)
    print(ran.stdout[-20_000:], ran.stderr[-2000:])
    assert ran.returncode == 0
    return ran.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize("desk", ["sqlite", "postgresql"], indirect=True)
def test_no_request_is_answered_otherwise_than_described(desk: Site, tmp_path: Path) -> None:
    ask(desk, tmp_path, "examples,coverage,fuzzing", EXAMPLES)
    told = ask(desk, tmp_path, "stateful", STORIES)  # what a submission is answered with leads to the other routes
    covered = re.search("API Links: +([0-9]+) covered", told)
    assert covered and int(covered[1]) >= 8
    assert desk.sql("SELECT count(*) FROM jobs")[0][0] > 50
    assert '"level": "ERROR"' not in "".join(process.output() for process in desk.running)
