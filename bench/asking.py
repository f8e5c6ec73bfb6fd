"""What the measures ask of a contender beside the load."""
from __future__ import annotations

from typing import Any

import requests

from bench import load
from bench.installations import Installation
from tests.servers import wait_until

EXPECTED = {"n": 5, "count": 3}


def submit(installation: Installation) -> str:
    """The id of one more job."""
    answer = requests.post(f"http://127.0.0.1:{installation.port}/jobs", json={"n": 5}, timeout=30)
    assert answer.status_code == 202, answer.text
    installation.accepted += 1
    return str(answer.json()["job_id"])


def result(installation: Installation, job_id: str) -> Any:
    """None as long as there is none."""
    return requests.get(f"http://127.0.0.1:{installation.port}/jobs/{job_id}", timeout=30).json().get("result")


def finished_job(installation: Installation) -> str:
    """The id of a job that the workers have worked off, with the right result: they are up."""
    job_id = submit(installation)
    wait_until(lambda: result(installation, job_id) is not None, 60, f"a job is done\n{installation.said()}")
    assert result(installation, job_id) == EXPECTED
    return job_id


def loaded(installation: Installation, what: str, **options: Any) -> dict[str, float]:
    """One load on it. Raises RuntimeError with what the contender's processes said."""
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    try:
        figures = load.apart(what, "--port", installation.port, *words)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{installation.said()}") from None
    if what != "poll":
        installation.accepted += int(figures["answered"])
    return figures
