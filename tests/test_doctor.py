"""The doctor: finds each broken promise by its id, repairs what is safe, and has nothing to say about a busy system."""
from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from pysqlite3 import dbapi2
from redis.exceptions import ConnectionError as RedisAway
from sqlalchemy import text

from app import clock, db, doctor, invariants, jobs, presence, redis_client, status, waking
from tasks import run_job
from tests import patients
from tests.conftest import World
from tests.patients import BROKEN, HEALTHY, Break, Make, put, the_job_runs
from tests.running import later, relay, submit

VIEW = "Redis agrees with SQL"


@pytest.fixture(autouse=True)
def callbacks_go_nowhere(request: pytest.FixtureRequest) -> None:
    if "world" in request.fixturenames:
        request.getfixturevalue("world").set(CALLBACK_ALLOW="127.0.0.1:9")


def examine(between: Callable[[], Any] = lambda: None) -> list[doctor.Finding]:
    """What the doctor finds; `between` happens between its two looks at Redis."""
    a_worker_lives()
    return doctor.examine(wait=lambda seconds: between())


def a_worker_lives() -> None:
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 2)


def found() -> list[tuple[str, str]]:
    return [(finding.promise, finding.id) for finding in examine()]


def test_every_invariant_is_broken_here() -> None:
    assert list(BROKEN) == [invariant.name for invariant in invariants.INVARIANTS]
    mended = {name for name, (story, _) in BROKEN.items() if story is not None}
    assert mended == {invariant.name for invariant in invariants.INVARIANTS if invariant.mend is not None}


@pytest.mark.parametrize("promise,happens", [
    pytest.param(promise, happens, id=happens.__name__)
    for promise, (_, ways) in BROKEN.items() for happens in ways])
def test_what_is_broken_is_found_and_mended_where_that_is_safe(
    api: FlaskClient, world: World, promise: str, happens: Break,
) -> None:
    broken_id = happens(api, world)
    world.redis.flushall()  # the view is not what this is about
    findings = examine()
    assert [(finding.promise, finding.id) for finding in findings] == [(promise, broken_id)]
    story = BROKEN[promise][0]
    if story is None:
        assert doctor.mend(findings) == findings and found() == [(promise, broken_id)]
    else:
        assert doctor.mend(findings) == [] and found() == []
        assert doctor.mend(findings) == []  # once more: by now there is nothing to repair
        story(api, world, broken_id)


def test_a_delivery_whose_host_has_others_that_are_due_later_is_found(api: FlaskClient, world: World) -> None:
    broken_id = patients.the_row_is_gone_and_its_host_is_busy_later(api, world)
    assert found() == [("a delivery that waits has an outbox row", broken_id)]


def test_a_delivery_that_is_mended_still_waits_for_its_time(api: FlaskClient, world: World) -> None:
    patients.the_row_of_a_waiting_delivery_is_gone(api, world)
    assert doctor.mend(examine()) == []
    assert relay(later(2990)) == [] and len(relay(later(3010))) == 1


def test_a_mend_wakes_the_relay(api: FlaskClient, world: World) -> None:
    patients.the_row_of_a_job_is_gone(api, world)
    world.redis.flushall()
    doctor.mend(examine())
    assert world.redis.llen(waking.KEY) == 1


# --- what passes by in a system that works ---


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_a_system_that_works_has_no_finding(api: FlaskClient, world: World, make: Make) -> None:
    make(api, world)
    for key in world.redis.keys("job:*"):  # the view is not what this is about
        world.redis.delete(key)
    assert found() == []


def test_all_of_it_at_once_has_no_finding(api: FlaskClient, world: World) -> None:
    """Every status of a job, of a row and of a delivery, with what Redis shows."""
    for make in (patients.jobs_are_pruned, patients.callbacks_are_made_and_wait, patients.a_job_runs,
                 patients.notes_wait_for_their_history):
        make(api, world)
    patients.fail_once(api)
    patients.submit_with_key(api, "another")
    assert {state for (state,) in world.sql("SELECT status FROM jobs")} == {"queued", "running", "succeeded"}
    assert world.redis.keys("job:*") and examine() == []


# --- what a mend may not do ---


def test_a_row_that_is_needed_again_is_not_removed(api: FlaskClient, world: World) -> None:
    """Between the look and the mend the worker was asked to stop: its job is queued anew."""
    job_id = patients.a_job_that_is_running_has_a_row(api, world)
    world.redis.flushall()
    findings = examine()
    with db.transaction() as tx:
        after = jobs.release(tx, jobs.find(tx, job_id))
        run_job.follow_up(tx, after, clock.now(), clock.now())
    assert doctor.mend(findings) == []
    the_job_runs(api, world, job_id)


@pytest.mark.parametrize("happens", [
    patients.the_row_of_a_job_is_gone, patients.a_delivery_is_gone, patients.the_row_of_a_due_delivery_is_gone,
    patients.a_row_is_parked],
    ids=lambda happens: happens.__name__)
def test_what_healed_meanwhile_stays_as_it_is(api: FlaskClient, world: World, happens: Break) -> None:
    happens(api, world)
    findings = examine()
    doctor.mend(findings)
    patients.publish()
    before = world.sql("SELECT * FROM outbox"), world.sql("SELECT * FROM deliveries")
    assert doctor.mend(findings) == []
    assert (world.sql("SELECT * FROM outbox"), world.sql("SELECT * FROM deliveries")) == before


@pytest.mark.parametrize("happens", [
    patients.the_row_of_a_job_is_gone, patients.a_delivery_is_gone, patients.the_row_of_a_due_delivery_is_gone,
    patients.a_job_that_is_running_has_a_row],
    ids=lambda happens: happens.__name__)
def test_a_job_that_is_gone_meanwhile_is_no_error(api: FlaskClient, world: World, happens: Break) -> None:
    happens(api, world)
    world.redis.flushall()
    findings = examine()
    for table in ("deliveries", "jobs"):
        world.sql(f"DELETE FROM {table}")
    assert doctor.mend(findings) == []


def test_what_somebody_moves_at_this_moment_is_left_alone(api: FlaskClient, world: World) -> None:
    if world.dialect == "sqlite":
        return  # one writer at a time: nobody is in the middle of anything
    for happens in (patients.the_row_of_a_job_is_gone, patients.the_row_of_a_due_delivery_is_gone,
                    patients.a_row_is_for_nobody):
        happens(api, world)
    world.redis.flushall()
    findings = examine()
    assert len(findings) == 3
    with db.transaction() as tx:
        for table in ("jobs", "deliveries", "outbox"):
            tx.execute(text(f"SELECT 1 FROM {table} FOR UPDATE"))
        assert doctor.mend(findings) == findings
    assert doctor.mend(findings) == [] and found() == []


def test_doctors_at_work_at_once_add_one_delivery(api: FlaskClient, world: World) -> None:
    for _ in range(5):
        run_job.run_once(submit(api, n=5, callback_url=patients.HOOK))
    for table in ("outbox", "deliveries"):
        world.sql(f"DELETE FROM {table}")
    world.redis.flushall()
    findings, barrier = examine(), threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        doctor.mend(findings)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.sql("SELECT count(*), count(DISTINCT job_id) FROM deliveries") == [(5, 5)]


# --- the view ---


def a_final_job(api: FlaskClient) -> str:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    return job_id


def test_a_hash_that_never_expires_is_forgotten(api: FlaskClient, world: World) -> None:
    broken, _ = a_final_job(api), a_final_job(api)
    world.redis.persist(f"job:{broken}")
    (finding,) = examine()
    assert (finding.promise, finding.id, finding.found) == (VIEW, broken, "the hash never expires")
    assert doctor.mend([finding]) == [] and world.redis.keys("job:*") != [] and examine() == []
    assert not world.redis.exists(f"job:{broken}")
    assert api.get(f"/jobs/{broken}").json["status"] == "succeeded"


def test_a_hash_of_an_unknown_job_is_told_and_left(api: FlaskClient, world: World) -> None:
    job_id = a_final_job(api)
    world.sql("DELETE FROM jobs")
    (finding,) = examine()
    assert (finding.promise, finding.id, finding.found) == (VIEW, job_id, "there is no such job")
    assert doctor.mend([finding]) == [finding] and world.redis.keys("job:*") == [f"job:{job_id}"]


def test_what_others_keep_in_redis_is_not_looked_at(api: FlaskClient, world: World) -> None:
    world.redis.hset("job:nightly", "a", "b")
    world.redis.set("job:42:lock", "x")
    assert examine() == []


def test_a_queue_that_no_worker_serves_is_found(api: FlaskClient, world: World) -> None:
    submit(api, n=5)
    relay()
    assert examine() == []
    world.redis.flushall()
    (finding,) = doctor.examine(wait=lambda seconds: None)
    assert (finding.promise, finding.id) == ("a queue with messages has a worker", "q:jobs2")


@pytest.mark.parametrize("change,says", [
    ({"version": "7"}, "the hash shows version 7, SQL has 2"),
    ({"status": "running"}, "the hash shows status running, SQL has succeeded"),
    ({"owner": "ada"}, "the hash shows owner ada, SQL has everybody"),
    ({"document": "{}"}, "the hash shows the document of something else"),
    ({"document": "no JSON"}, "the hash shows the document of something else")])
def test_a_hash_that_shows_something_else_is_forgotten(
    api: FlaskClient, world: World, change: dict[str, str], says: str,
) -> None:
    job_id = a_final_job(api)
    world.redis.hset(f"job:{job_id}", mapping=change)
    (finding,) = examine()
    assert (finding.promise, finding.id, finding.found) == (VIEW, job_id, says)
    assert doctor.mend([finding]) == [] and examine() == []


def test_what_is_no_hash_is_forgotten(api: FlaskClient, world: World) -> None:
    job_id = a_final_job(api)
    world.redis.set(f"job:{job_id}", "text", ex=60)
    (finding,) = examine()
    assert (finding.id, finding.found) == (job_id, "it is no hash")
    assert doctor.mend([finding]) == [] and examine() == []


def test_a_hash_that_heals_meanwhile_is_no_finding(api: FlaskClient, world: World) -> None:
    job_id = a_final_job(api)
    put("jobs", version=doctor.jobs.c.version + 1)
    assert examine(between=lambda: world.redis.delete(f"job:{job_id}")) == []


def test_the_hash_of_a_job_that_moves_at_each_look_is_no_finding(api: FlaskClient, world: World) -> None:
    """Between a commit and its write to Redis the two differ; a job that is tried often may be seen so twice."""
    job_id = a_final_job(api)
    put("jobs", version=doctor.jobs.c.version + 1)

    def move() -> None:
        world.redis.hset(f"job:{job_id}", "version", "3")
        put("jobs", version=doctor.jobs.c.version + 1)

    assert examine(between=move) == []


def test_a_view_that_agrees_is_looked_at_once(api: FlaskClient, world: World) -> None:
    a_final_job(api)
    submit(api, n=5)
    world.redis.set("jobs:other", "not ours")

    def wait(seconds: float) -> None:
        raise AssertionError("there was nothing to wait for")

    assert doctor.examine(wait) == []


def test_the_second_look_comes_when_a_stale_hash_is_gone(api: FlaskClient, world: World) -> None:
    world.redis.persist(f"job:{submit(api, n=5)}")
    waits: list[float] = []
    doctor.examine(waits.append)
    assert waits == [doctor.SECOND_LOOK_SECONDS] and waits[0] > status.UNFINISHED_TTL_SECONDS


def test_many_hashes_are_looked_at_batch_after_batch(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "_BATCH", 2)
    ids = [submit(api, n=5) for _ in range(5)]
    for job_id in ids:
        world.redis.persist(f"job:{job_id}")
    assert sorted(finding.id for finding in examine()) == sorted(ids)


@contextlib.contextmanager
def redis_away(world: World) -> Iterator[None]:
    url = redis_client.config.redis_url()
    world.set(REDIS_URL="redis://127.0.0.1:1/0")
    redis_client._client.cache_clear()
    try:
        yield
    finally:
        world.set(REDIS_URL=url)
        redis_client._client.cache_clear()
        redis_client._away_until = 0.0


def test_a_redis_that_is_away_is_a_finding(api: FlaskClient, world: World) -> None:
    broken = patients.the_row_of_a_job_is_gone(api, world)
    with redis_away(world):
        assert [(finding.promise, finding.id, finding.found) for finding in examine()][1:] == [
            ("Redis can be looked at", "-", "ConnectionError")]
        left = doctor.mend(examine())
        assert [finding.promise for finding in left] == ["Redis can be looked at"]
    the_job_runs(api, world, broken)


def test_a_redis_that_goes_away_between_the_looks_is_a_finding(api: FlaskClient, world: World) -> None:
    world.redis.persist(f"job:{a_final_job(api)}")

    def go() -> None:
        raise RedisAway

    assert [finding.promise for finding in examine(between=go)] == ["Redis can be looked at"]


def test_a_hash_that_cannot_be_forgotten_now_is_left(api: FlaskClient, world: World) -> None:
    world.redis.persist(f"job:{a_final_job(api)}")
    findings = examine()
    with redis_away(world):
        assert doctor.mend(findings) == findings
    assert doctor.mend(findings) == []


def test_a_damaged_file_is_a_finding(api: FlaskClient, world: World) -> None:
    if world.dialect != "sqlite":
        return
    submit(api, n=5)
    with contextlib.closing(dbapi2.connect(world.url.removeprefix("sqlite:///"))) as raw, raw:
        raw.execute("PRAGMA ignore_check_constraints = ON")
        raw.execute("UPDATE outbox SET queue = 'x', state = 'odd'")
    (finding,) = examine()
    assert finding.promise == "the database file is intact" and "outbox" in finding.found
    assert doctor.mend([finding]) == [finding]


# --- the command ---


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    monkeypatch.setattr(doctor, "SECOND_LOOK_SECONDS", 0.0)
    a_worker_lives()
    return doctor.main()


def test_the_command_says_that_everything_holds(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:
    submit(api, n=5)
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out == "jobs: 1; everything holds\n"
    assert run(monkeypatch, "--fix") == 0


def test_the_command_prints_what_is_wrong_and_changes_nothing(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:
    job_id = patients.the_row_of_a_job_is_gone(api, world)
    for _ in range(2):
        assert run(monkeypatch) == 1
        head, row, end = capsys.readouterr().out.splitlines()
        assert head.split("  ")[0] == "what must hold" and head.endswith("what helps")
        assert row.startswith("a queued job has an outbox row  " + job_id) and row.endswith("--fix stages one")
        assert end == "jobs: 1; wrong: 1"
    assert world.count("outbox") == 0


def test_the_command_repairs_and_names_what_is_left(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:
    mended, left = patients.the_row_of_a_job_is_gone(api, world), patients.a_worker_died_long_ago(api, world)
    world.redis.flushall()
    assert run(monkeypatch, "--fix") == 1
    out = capsys.readouterr().out
    rows = out.splitlines()
    assert any(mended in row and row.endswith("repaired") for row in rows)
    assert any(left in row and row.endswith("a beat?") for row in rows)
    assert out.endswith("\n1 repaired, 1 left\njobs: 2; wrong: 1\n")
    put("jobs", "status = 'running'", lease_until=30)
    assert run(monkeypatch, "--fix") == 0


def test_the_command_repairs_more_than_a_question_names(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:
    monkeypatch.setattr(invariants, "MOST", 3)
    monkeypatch.setattr(doctor, "_SHOWN", 2)
    for _ in range(8):
        patients.the_row_of_a_job_is_gone(api, world)
    assert run(monkeypatch) == 1
    assert "3 in all, or more" in capsys.readouterr().out
    assert run(monkeypatch, "--fix") == 0
    assert "8 repaired, 0 left\njobs: 8; everything holds" in capsys.readouterr().out
    assert world.count("outbox", "state = 'waiting'") == 8


def test_a_long_table_is_cut() -> None:
    findings = [doctor.Finding("p", str(number), "f", "h") for number in range(25)]
    lines = doctor.table(findings, findings).splitlines()
    assert len(lines) == 22 and "25 in all" in lines[-1] and "or more" not in lines[-1]


@pytest.mark.parametrize("url,says", [
    ("postgresql+psycopg://nobody@127.0.0.1:1/nothing", "OperationalError"),
    ("sqlite:////proc/nothing/jobs.sqlite3", "DATABASE_URL"),
    ("mysql://nowhere", "DATABASE_URL"),
])
def test_a_database_that_is_away_is_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any, url: str, says: str,
) -> None:
    db.dispose()
    world.set(DATABASE_URL=url)
    assert run(monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("doctor: ") and says in printed.err


def test_tables_of_another_version_are_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:
    world.sql("DROP TABLE alembic_version")
    assert run(monkeypatch) == 2
    assert "make setup" in capsys.readouterr().err


def test_the_command_by_itself(api: FlaskClient, world: World) -> None:
    job_id = patients.the_row_of_a_job_is_gone(api, world)
    command = [sys.executable, "-m", "app.doctor"]
    for arguments, code in (([], 1), (["--fix"], 0), ([], 0), (["--unknown"], 2)):
        ran = subprocess.run([*command, *arguments], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
        assert ran.returncode == code, ran.stderr
    the_job_runs(api, world, job_id)


def test_the_doctor_knows_neither_tasks_nor_celery() -> None:
    program = "import sys, app.doctor; print({name.split('.')[0] for name in sys.modules} & {'tasks', 'celery'})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
