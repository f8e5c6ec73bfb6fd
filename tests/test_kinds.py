"""Kinds: the built-in ones, and those that a stranger writes in a package of its own."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union

import pytest
from flask.testing import FlaskClient
from pydantic import AliasChoices, AliasPath, BaseModel, Field, RootModel, field_validator

from app import kinds
from app.errors import WrongKind
from tasks.primes import count
from tests.conftest import World, one_database
from tests.running import Anything, a_kind, run_to_end, submit

EXAMPLES = Path(__file__).parent.parent / "examples"

# OEIS A006880, and the beginning of A000720.
PI = {
    0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 4, 8: 4, 9: 4, 10: 4, 11: 5, 24: 9, 25: 9, 26: 9, 48: 15, 49: 15,
    100: 25, 1000: 168, 10**4: 1229, 10**5: 9592, 10**6: 78498, 10**7: 664579, 10**8: 5761455,
    2**20: 82025, 2**21: 155611, 2**21 + 1: 155611, 2**21 + 17: 155612, 2**22: 295947, 2**23: 564163,
}


class Watched:
    """A `Job` that keeps the progress it was told."""

    id, attempt = "x", 1

    def __init__(self, cancelled: bool = False) -> None:
        self.told: list[tuple[int, int]] = []
        self._cancelled = cancelled

    def progress(self, done: int, total: int) -> None:
        self.told.append((done, total))

    def cancelled(self) -> bool:
        return self._cancelled


@pytest.mark.parametrize("n,expected", PI.items())
def test_primes_are_counted_right(n: int, expected: int) -> None:
    assert count(n, Watched()) == expected


def test_primes_agree_with_trial_division() -> None:
    found = 0
    for n in range(2000):
        found += n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
        assert count(n, Watched()) == found


def test_primes_tell_their_progress() -> None:
    job = Watched()
    count(10**7, job)
    assert len(job.told) > 3 and job.told == sorted(job.told) and job.told[-1] == (10**7, 10**7)


def test_primes_stop_when_nobody_wants_them() -> None:
    job = Watched(cancelled=True)
    count(10**8, job)
    assert job.told == []


@one_database
def test_a_strangers_package_is_used_like_the_built_in_kinds(world: World, monkeypatch: Any) -> None:
    """examples/greenhouse imports nothing of this project but app.kinds, and this project does not know it."""
    from app.api import create_app

    monkeypatch.syspath_prepend(str(EXAMPLES))
    world.set(JOB_MODULES="greenhouse.watering")
    try:
        api = create_app().test_client()
        job_id = submit(api, "watering", beds=3)
        assert run_to_end(job_id).status == "succeeded"
        assert api.get(f"/jobs/{job_id}").json["result"] == {"beds": 3, "litres": 4.5, "attempt": 1}
        refused = run_to_end(submit(api, "watering", beds=1, crop="cacti"))
        assert (refused.error_code, refused.error_message) == ("refused", "cacti want no water")
        answer = api.post("/jobs", json={"kind": "watering", "beds": 0})
        assert answer.json["errors"][0]["pointer"] == "#/beds"
        answer = api.post("/jobs", json={"kind": "flooding"})
        assert answer.json["errors"] == [{"pointer": "#/kind", "detail": "must be one of primes, watering"}]
    finally:
        kinds._registered.pop("watering", None)
        sys.modules.pop("greenhouse.watering", None)


class Kinded(BaseModel):
    kind: str


class Aliased(BaseModel):
    url: str = Field(alias="callback_url")


class Chosen(BaseModel):
    url: str = Field(validation_alias=AliasChoices("url", "callback_url"))


class Pathed(BaseModel):
    url: str = Field(validation_alias=AliasPath("kind", 0))


class Rooted(RootModel[Union[Anything, Annotated[Kinded, "of two"], None]]):
    pass


@pytest.mark.parametrize("name,model,limits,words", [
    ("primes", Anything, {}, "taken by tasks.primes"), ("x y", Anything, {}, "a name is"), ("", Anything, {}, "a name"),
    ("k", Kinded, {}, "a member called kind"), ("k", Aliased, {}, "a member called callback_url"),
    ("k", Chosen, {}, "a member called callback_url"), ("k", Pathed, {}, "a member called kind"),
    ("k", Rooted, {}, "a member called kind"),
    ("k", Anything, {"time_limit": float("nan")}, "time_limit"), ("k", Anything, {"time_limit": 10**9}, "time_limit"),
    ("k", Anything, {"queue": "q" * 101}, "queue"), ("k", Anything, {"queue": ""}, "queue"),
    ("k", Anything, {"max_attempts": 0}, "max_attempts"), ("k", Anything, {"time_limit": 0}, "time_limit"),
    ("k", Anything, {"queue": "relay"}, "queue"),
])
@one_database
def test_a_kind_that_cannot_be_registered(
    world: World, name: str, model: type[BaseModel], limits: dict, words: str,
) -> None:
    kinds.registry()
    with pytest.raises(WrongKind, match=words) as raised:
        kinds.kind(name, model, **limits)(lambda input, job: None)
    assert "\n" not in str(raised.value)


class Wordless(ValueError):
    def __str__(self) -> str:
        raise LookupError("sec" + "ret")


def _endlessly() -> None:
    _endlessly()


def _raise(error: BaseException) -> None:
    raise error


BROKEN: dict[str, Callable[[], None]] = {
    "RuntimeError": lambda: _raise(RuntimeError("sec" + "ret")), "KeyError": lambda: _raise(KeyError("sec" + "ret")),
    "RecursionError": _endlessly, "SystemExit": lambda: _raise(SystemExit("sec" + "ret")),
    "Refused": lambda: _raise(kinds.Refused("sec" + "ret")), "LookupError": lambda: _raise(Wordless())}


class Broken(BaseModel):
    how: str

    @field_validator("how")
    @classmethod
    def _break(cls, value: str) -> str:
        BROKEN[value]()
        return value


@pytest.mark.parametrize("how", BROKEN)
@one_database
def test_a_validator_that_breaks_refuses_the_input(api: FlaskClient, world: World, caplog: Any, how: str) -> None:
    with a_kind(print, input=Broken) as name:
        answer = api.post("/jobs", json={"kind": name, "how": how}, headers={"Idempotency-Key": "a"})
    assert answer.status_code == 422 and answer.json["type"].endswith("/invalid-input")
    assert answer.json["errors"] == [{"pointer": "#", "detail": "cannot be validated"}]
    assert api.get("/jobs").json["jobs"] == []
    again = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "a"})
    assert again.status_code == 202  # the key stands for nothing yet
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (line.kind, line.error) == (name, how) and "test_kinds.py" in line.stack
    assert "secret" not in str(line.__dict__) and "secret" not in answer.text


@pytest.mark.parametrize("program,words", [
    ("raise RuntimeError('broken\\ntwice')", "RuntimeError: broken"), ("raise SystemExit(0)", "SystemExit: 0"),
    ("from app.kinds import kind\nfrom pydantic import BaseModel\n"
     "class M(BaseModel): pass\nkind('primes', M)(print)", "is taken by tasks.primes"),
    (None, "No module named 'strange'"),
])
@pytest.mark.parametrize("line", ["app.api", "tasks worker", "tasks courier"])
@one_database
def test_a_module_that_cannot_be_used_stops_the_start_with_one_line(
    world: World, tmp_path: Path, program: str | None, words: str, line: str,
) -> None:
    if program is not None:
        (tmp_path / "strange.py").write_text(program)
    world.set(JOB_MODULES="strange", PYTHONPATH=tmp_path)
    ran = subprocess.run([sys.executable, "-m", *line.split()], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1 and words in ran.stderr


@one_database
def test_kinds_load_without_celery(world: World, api: FlaskClient) -> None:
    program = "import sys; from app import kinds; kinds.registry(); print('celery' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
