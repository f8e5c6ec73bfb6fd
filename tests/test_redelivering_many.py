"""python -m app.redeliver: one more round for each job of a range whose latest round ended so, and for nobody twice."""
from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import select

from app import clock, db, deliveries, interventions, jobs, redeliver, redis_client, rounds, schema, turns, waking
from app.rounds import Range
from tasks import prune_expired, run_job
from tests import receiver as receivers
from tests.asking import all_at_once, another, deliver_all, nothing_is_wrong
from tests.asking import redeliver as redeliver_one
from tests.conftest import World, one_database
from tests.processes import ROOT
from tests.receiver import Receiver
from tests.running import Crash, a_kind, later, relay, submit
from tests.servers import wait_until
from tests.test_redelivering import waits_for_a_lock

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


def end(api: FlaskClient, receiver: Receiver, *codes: int, kind: str = "primes") -> list[str]:
    """Jobs that have ended, whose callbacks were answered with these; returns their ids."""
    ids = []
    for code in codes:
        receiver.respond = receivers.status(code)
        ids.append(submit(api, kind, callback_url=receiver.url, **({"n": 5} if kind == "primes" else {})))
        run_job.run_once(ids[-1])
        deliver_all()
    receiver.respond = None
    return ids


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: str) -> tuple[int, list[str], str]:
    """The command in this process: its exit status, its lines, its complaint."""
    monkeypatch.setattr(sys, "argv", ["redeliver", *shlex.split(arguments)])
    capsys.readouterr()
    code = redeliver.main()
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    return functools.partial(run, monkeypatch, capsys)


def pending(world: World) -> list[str]:
    return sorted(row[0] for row in world.sql("SELECT job_id FROM deliveries WHERE state = 'pending'"))


def everything(world: World) -> list[Any]:
    return [world.sql(f"SELECT * FROM {table} ORDER BY 1") for table in ("jobs", "deliveries", "outbox")]


# --- what is counted, and done ---


def test_without_yes_it_counts_and_changes_nothing(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    end(api, receiver, 400, 404, 204, 410)
    before = everything(world)
    code, lines, complaint = command("--since 1h")
    assert (code, complaint) == (0, "") and everything(world) == before
    assert re.fullmatch(r"jobs whose latest round ended as exhausted from \S+Z to \S+Z: 2", lines[0])
    assert lines[1].split() == ["exhausted", f"127.0.0.1:{receiver.port}", "2"]
    assert lines[2] == "Nothing was changed. --yes asks for one more round of each, spread over 0:00:00."
    assert command("--since 1h --per-second 0.1")[1][-1].endswith("spread over 0:00:20.")


def test_with_yes_it_counts_first_and_each_gets_a_round_of_its_own(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    first, _, second, _ = end(api, receiver, 400, 204, 404, 410)
    code, lines, complaint = command("--since 1h --yes")
    assert (code, complaint, len(lines)) == (0, "", 3) and lines[0].endswith(": 2")
    assert re.fullmatch(r"rounds asked for: 2; the last one begins \S+Z", lines[2])
    assert pending(world) == sorted([first, second])
    for job_id in (first, second):
        assert api.get(f"/jobs/{job_id}").json["callback"]["status"] == "pending"
    deliver_all(later(10))
    assert world.sql("SELECT state, count(*) FROM deliveries GROUP BY state ORDER BY state") == [
        ("delivered", 3), ("exhausted", 2), ("gone", 1)]
    told = Counter(hook.headers["webhook-id"] for hook in receiver.hooks)
    assert len(told) == 6 and set(told.values()) == {1} and nothing_is_wrong(world)
    assert command("--since 1h --yes")[1][-1] == "rounds asked for: 0" and len(receiver.hooks) == 6


def test_the_latest_round_is_the_one_that_counts(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    """One was told in the end, one waits already, one is being told, one failed again."""
    told, waits, is_told, failed = end(api, receiver, 400, 400, 400, 400)
    for job_id in (told, failed):
        receiver.respond = receivers.status(204 if job_id == told else 400)
        redeliver_one(api, job_id)
        deliver_all()
    redeliver_one(api, waits)
    redeliver_one(api, is_told)
    world.sql("UPDATE deliveries SET state = 'sending', next_attempt_at = NULL, leased_until = created_at "
              "WHERE state = 'pending' AND job_id = :id", id=is_told)
    before = world.count("deliveries")
    assert command("--since 1h --yes")[1][0].endswith(": 1")
    assert pending(world) == sorted([waits, failed]) and world.count("deliveries") == before + 1


@one_database
@pytest.mark.parametrize("asked,ends", [
    ("", ["exhausted"]), ("--status gone", ["gone"]), ("--status delivered,gone", ["delivered", "gone"]),
    ("--status refused", ["refused"]), ("--status 'exhausted, refused'", ["exhausted", "refused"])])
def test_only_what_ended_so_is_asked_for(
    api: FlaskClient, world: World, receiver: Receiver, command: Any, asked: str, ends: list[str],
) -> None:
    end(api, receiver, 400, 410, 204)
    (refused,) = end(api, receiver, 400)
    world.sql("UPDATE deliveries SET state = 'refused' WHERE job_id = :id", id=refused)
    states = dict(row for row in world.sql("SELECT job_id, state FROM deliveries"))
    assert command(f"--since 1h {asked} --yes")[0] == 0
    assert sorted(states[job_id] for job_id in pending(world)) == ends


def test_only_what_ended_in_the_range_is_asked_for(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    """By the end of the round, whenever the job ended: its beginning is in the range, its end is not."""
    before, first, last, after = end(api, receiver, 400, 400, 400, 400)
    for job_id, moment in ((before, "17:59:59.999999"), (first, "18:00:00"), (last, "18:59:59"), (after, "19:00:00")):
        at = f"2026-11-01 {moment}" + ("+00" if world.dialect == "postgresql" else ".000000" * (len(moment) == 8))
        world.sql("UPDATE deliveries SET finished_at = :at WHERE job_id = :id", id=job_id, at=at)
    assert command("--since 2026-11-01T19:00:00+01:00 --until 2026-11-01T19:00:00Z --yes")[0] == 0
    assert pending(world) == sorted([first, last])


def test_only_this_host_and_this_kind_are_asked_for(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    with a_kind(lambda input, job: None) as kind, receivers.receiver() as other:
        world.set(CALLBACK_ALLOW="127.0.0.1/32")
        end(api, receiver, 400)
        (two,) = end(api, other, 400)
        (three,) = end(api, other, 400, kind=kind)
        assert command(f"--since 1h --host 127.0.0.1:{other.port}")[1][0].endswith(": 2")
        assert command(f"--since 1h --kind {kind} --yes")[0] == 0 and pending(world) == [three]
        assert command(f"--since 1h --host 127.0.0.1:{other.port} --yes")[0] == 0
        assert pending(world) == sorted([two, three])
        assert command("--since 1h --host 127.0.0.1:1 --kind nothing")[1][-1] == "Nothing to do."


def test_new_rounds_do_not_begin_all_at_once(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    """One in each ten seconds; nothing wakes the relay for what is not due."""
    end(api, receiver, *[400] * 6)
    world.redis.delete(waking.KEY)
    began = clock.now()
    assert command("--since 1h --per-second 0.1 --yes")[0] == 0
    assert world.redis.llen(waking.KEY) == 0 and relay() == []
    with db.reading() as view:
        due = sorted(view.execute(select(schema.deliveries.c.next_attempt_at).where(
            schema.deliveries.c.state == "pending")).scalars())
    for number, moment in enumerate(due):
        assert number * 10 <= (moment - began).total_seconds() <= number * 10 + 15
    assert len(due) == 6 and nothing_is_wrong(world)
    assert len(relay(later(45))) == 4  # of the four or five that are due then, as many as there is room for


def test_who_cannot_wait_for_its_turn_asks_for_the_one_job(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    (job_id,) = end(api, receiver, 400)
    command("--since 1h --yes --per-second 0.01")
    assert redeliver_one(api, job_id).status_code == 202
    deliver_all()
    assert len(receiver.hooks) == 2 and world.count("deliveries") == 2


# --- twice, and in the middle ---


def test_two_commands_at_once_make_one_round_each(api: FlaskClient, world: World, receiver: Receiver) -> None:
    ids = end(api, receiver, *[400] * 5)
    wanted = Range(later(-3600), later(1), ("exhausted",))
    found = list(rounds.ended(wanted))  # both have seen the same
    became = all_at_once([lambda: [rounds.ask(known, clock.now()) for known in found]] * 2)
    assert Counter(became[0] + became[1]) == {rounds.ASKED: 5, rounds.TOLD_ANEW: 5}
    assert pending(world) == sorted(ids) and world.count("deliveries") == 10 and nothing_is_wrong(world)


def test_who_had_to_wait_sees_what_was_done_meanwhile(api: FlaskClient, world: World, receiver: Receiver) -> None:
    (job_id,) = end(api, receiver, 400)
    (known,) = rounds.ended(Range(later(-3600), later(1), ("exhausted",)))
    became: list[str] = []
    asking = threading.Thread(target=lambda: became.append(rounds.ask(known, clock.now())))
    with db.transaction() as tx:
        job = jobs.keep(tx, job_id)
        turns.hold(tx, known.host)
        asking.start()
        if world.dialect == "postgresql":
            wait_until(lambda: waits_for_a_lock(world))
        deliveries.add(tx, job, clock.now(), later(1))
    asking.join()
    assert became == [rounds.TOLD_ANEW] and world.count("deliveries") == 2


def test_a_round_that_ended_meanwhile_is_another_one(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """Asked for, told and given up between the look and the wish: that is for the next command."""
    (job_id,) = end(api, receiver, 400)
    (known,) = rounds.ended(Range(later(-3600), later(1), ("exhausted",)))
    receiver.respond = receivers.status(400)
    redeliver_one(api, job_id)
    deliver_all()
    assert rounds.ask(known, clock.now()) == rounds.TOLD_ANEW and pending(world) == []


def test_the_command_after_an_interruption_goes_on(
    api: FlaskClient, world: World, receiver: Receiver, command: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    end(api, receiver, *[400] * 5)
    ask = interventions.redeliver_after
    asked: list[str] = []

    def interrupted(*arguments: Any) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(arguments[2])
        return ask(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(interventions, "redeliver_after", interrupted)
        code, _, complaint = command("--since 1h --yes")
    assert (code, complaint) == (130, "redeliver: interrupted (rounds asked for: 2, perhaps one more)\n")
    assert pending(world) == sorted(asked)
    code, lines, _ = command("--since 1h --yes")
    assert lines[0].endswith(": 3") and lines[-1].startswith("rounds asked for: 3; the last one")
    assert len(pending(world)) == 5 and world.count("deliveries") == 10 and nothing_is_wrong(world)


def test_a_wish_that_dies_before_its_commit_leaves_nothing(
    api: FlaskClient, world: World, receiver: Receiver, monkeypatch: pytest.MonkeyPatch,
) -> None:
    end(api, receiver, 400)
    before = everything(world)
    (known,) = rounds.ended(Range(later(-3600), later(1), ("exhausted",)))

    def die(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(interventions.jobs, "touch", die)
    with pytest.raises(Crash):
        rounds.ask(known, clock.now())
    assert everything(world) == before


def test_an_exhausted_round_that_is_kept_is_asked_for_again_though_its_job_has_expired(
    api: FlaskClient, world: World, receiver: Receiver, command: Any,
) -> None:
    (job_id,) = end(api, receiver, 400)
    world.sql("UPDATE jobs SET expires_at = finished_at")
    code, lines, _ = command("--since 1h --yes")
    assert code == 0 and lines[0].endswith(": 1") and lines[-1].startswith("rounds asked for: 1")
    assert pending(world) == [job_id]


def test_what_has_expired_is_left_alone_and_counted(
    api: FlaskClient, world: World, receiver: Receiver, command: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One before the command, one while it runs, and one is pruned while it runs."""
    ids = sorted(end(api, receiver, *[410] * 4))
    world.sql("UPDATE jobs SET expires_at = finished_at WHERE id = :id", id=ids[0])
    ask = interventions.redeliver_after

    def meanwhile(*arguments: Any) -> Any:
        if arguments[2] == ids[0]:
            world.sql("UPDATE jobs SET expires_at = finished_at WHERE id = :id", id=ids[1])
            assert prune_expired.run_once(clock.now()) == 2
            world.sql("UPDATE jobs SET expires_at = finished_at WHERE id = :id", id=ids[2])
        return ask(*arguments)

    monkeypatch.setattr(interventions, "redeliver_after", meanwhile)
    code, lines, _ = command("--since 1h --status gone --yes")
    assert code == 0 and lines[0].endswith(": 3") and lines[2] == "left alone, as they have expired: 1"
    assert lines[-1].startswith("rounds asked for: 1; left alone: 3 expired; the last one")
    assert pending(world) == [ids[3]]


def test_it_asks_beside_clients_and_couriers(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """Everybody at once holds up nobody, and no try is made twice."""
    ids = end(api, receiver, *[400] * 4)
    known = list(rounds.ended(Range(later(-3600), later(1), ("exhausted",))))
    calls: list[Any] = [lambda: [rounds.ask(each, clock.now()) for each in known]] * 2
    calls += [lambda: [redeliver_one(another(api), job_id).status_code for job_id in reversed(ids)]]
    calls += [functools.partial(deliver_all, later(1))] * 2
    assert all_at_once(calls)[2] == [202] * 4
    deliver_all(later(5))
    told = Counter(hook.headers["webhook-id"] for hook in receiver.hooks)
    assert set(told.values()) == {1} and world.count("deliveries") in range(8, 13)
    assert world.count("outbox") == 0 and nothing_is_wrong(world)


# --- many ---


def test_a_range_is_read_in_pages_and_each_job_is_met_once(
    api: FlaskClient, world: World, receiver: Receiver, command: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However soon its new round has ended, and though that is in the range by a clock that is behind."""
    monkeypatch.setattr(rounds, "PAGE", 2)
    ids = end(api, receiver, *[400] * 5)
    assert [known.job_id for known in rounds.ended(Range(later(-3600), later(1), ("exhausted",)))] == sorted(ids)
    ask = interventions.redeliver_after

    def told_at_once(*arguments: Any) -> Any:
        begun = ask(*arguments)
        receiver.respond = receivers.status(400)
        deliver_all(later(100))
        world.sql("UPDATE deliveries SET finished_at = (SELECT min(finished_at) FROM deliveries)")
        return begun

    monkeypatch.setattr(interventions, "redeliver_after", told_at_once)
    assert command("--since 1h --yes")[1][-1].startswith("rounds asked for: 5; ")
    assert world.count("deliveries") == 10


def fill(world: World, many: int) -> None:
    """Jobs with a delivery each, every tenth of them exhausted an hour ago."""
    series = ("generate_series(1, :many)" if world.dialect == "postgresql" else
              "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :many) SELECT i FROM n)")
    ago = clock.now() - timedelta(hours=1)
    moment = {"at": ago if world.dialect == "postgresql" else ago.replace(tzinfo=None).isoformat(" "), "many": many}
    world.sql(
        "INSERT INTO jobs (id, owner, kind, queue, status, max_attempts, time_limit_seconds, input, result, "
        "callback_url, created_at, finished_at, expires_at) SELECT 'job-' || (100000 + i), 'ada', 'primes', 'q', "
        f"'succeeded', 3, 30, '{{}}', '1', 'http://127.0.0.1:9/', :at, :at, '2999-01-01 00:00:00' FROM {series} AS g(i)"
        .replace("AS g(i)", "AS g(i)" if world.dialect == "postgresql" else ""), **moment)
    world.sql(
        "INSERT INTO deliveries (id, job_id, url, host, state, created_at, finished_at) SELECT 'msg_' || id, id, "
        "callback_url, '127.0.0.1:9', CASE WHEN id LIKE '%0' THEN 'exhausted' ELSE 'delivered' END, :at, :at FROM jobs",
        at=moment["at"])
    world.sql("ANALYZE")


def test_a_page_is_read_from_where_the_last_one_ended(world: World) -> None:
    """By an index, and no further than it needs: the last page of many costs what the first one did."""
    fill(world, 20_000)
    wanted = Range(later(-7200), later(0), ("exhausted",))
    assert len(list(rounds.ended(wanted))) == 2000
    before = "EXPLAIN " if world.dialect == "postgresql" else "EXPLAIN QUERY PLAN "
    with db.reading() as view:
        asked = str(rounds.page(wanted, "job-110000").compile(view.engine, compile_kwargs={"literal_binds": True}))
        plan = [str(row) for row in view.exec_driver_sql(before + asked)]
    told = "\n".join(plan)
    assert "ix_deliveries_job_id" in told and not re.search("Seq Scan|SCAN|Sort|TEMP B-TREE|OFFSET", told), told
    if world.dialect == "postgresql":
        scans = [plan[number + 1] for number, line in enumerate(plan) if "Index Scan" in line]
        assert len(scans) == 3 and all("job-110000" in line or "(job_id)::text = " in line or "(id)::text = " in line
                                       for line in scans), told


@one_database
def test_the_breakdown_is_small_whatever_there_is(world: World, command: Any) -> None:
    fill(world, 200)
    world.sql("UPDATE deliveries SET host = 'on-' || id")
    _, lines, _ = command("--since 2h")
    assert len(lines) == 13 and lines[0].endswith(": 20") and lines[-2].split() == ["...", "10", "more", "10"]


@one_database
def test_it_says_how_far_it_is(world: World, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 30)
    monkeypatch.setattr(redeliver, "_TELL_SECONDS", 0.0)
    assert command("--since 2h --yes")[1][2:5] == ["1 of 3", "2 of 3", "3 of 3"]


# --- the words of the command ---


@pytest.mark.parametrize("text,meant,assumed", [
    ("2026-11-29T18:00:00Z", "2026-11-29T18:00:00.000Z", False),
    ("2026-11-29T18:00:00+09:00", "2026-11-29T09:00:00.000Z", False),
    ("2026-11-29T18:00", "2026-11-29T18:00:00.000Z", True), ("2026-11-29", "2026-11-29T00:00:00.000Z", True),
    ("30s", "2026-11-30T11:59:30.000Z", False), ("90m", "2026-11-30T10:30:00.000Z", False),
    ("2h", "2026-11-30T10:00:00.000Z", False), ("3d", "2026-11-27T12:00:00.000Z", False)])
def test_a_moment_is_what_one_would_think(text: str, meant: str, assumed: bool) -> None:
    moment, naive = redeliver.moment(text, NOW)
    assert (clock.isoformat(moment), naive) == (meant, assumed)


@one_database
def test_a_moment_without_a_zone_is_said_to_be_utc(world: World, command: Any) -> None:
    code, lines, _ = command("--since 2026-11-01 --until 2026-11-02T18:00")
    assert code == 0 and lines[:2] == [
        "--since 2026-11-01 has no zone and is taken as UTC: 2026-11-01T00:00:00.000Z",
        "--until 2026-11-02T18:00 has no zone and is taken as UTC: 2026-11-02T18:00:00.000Z"]
    assert lines[2].endswith("from 2026-11-01T00:00:00.000Z to 2026-11-02T18:00:00.000Z: 0")


@one_database
@pytest.mark.parametrize("arguments", [
    "--since yesterday", "--since ''", "--since 2", "--since h", "--since -2h", "--since 2w", "--since ２h",
    "--since 99999999999999h", "--since 2026-13-01", "--since 0001-01-01T00:00:00+14:00", "--since 2h --until never",
    "--since 2999-01-01", "--since 1h --until 2h", "--since 1h --status pending", "--since 1h --status ''",
    "--since 1h --status exhausted,sent", "--since 1h --host example.com", "--since 1h --host :80",
    "--since 1h --host a:b", "--since 1h --host 'a\nb:80'", "--since 1h --kind 'a\udcffb'", "--since 1h --per-second 0",
    "--since 1h --per-second nan"])
def test_nonsense_is_one_line(world: World, command: Any, arguments: str) -> None:
    code, lines, complaint = command(arguments.replace("--since -2h", "--since=-2h"))
    assert code == 2 and complaint.startswith("redeliver: --") and complaint.count("\n") == 1
    assert not [line for line in lines if "zone" not in line]


@pytest.mark.parametrize("text,host", [
    ("hooks.example:443", "hooks.example:443"), ("Hooks.Example.:443", "hooks.example:443"), ("[::1]:80", "::1:80"),
    ("::1:80", "::1:80"), ("127.0.0.1:0080", "127.0.0.1:80")])
def test_a_host_may_be_written_as_in_a_url_or_as_it_is_shown(text: str, host: str) -> None:
    assert redeliver._host(text) == host


@pytest.mark.parametrize("url,says", [
    ("postgresql+psycopg://nobody@127.0.0.1:1/nothing", "OperationalError"), ("mysql://nowhere", "DATABASE_URL")])
def test_a_database_that_is_away_is_one_line(world: World, command: Any, url: str, says: str) -> None:
    db.dispose()
    world.set(DATABASE_URL=url)
    code, lines, complaint = command("--since 1h --yes")
    assert (code, lines, complaint.count("\n")) == (2, [], 1) and says in complaint


def test_a_database_that_goes_away_in_the_middle_is_one_line(
    world: World, command: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(world, 30)
    ask, asked = interventions.redeliver_after, threading.Semaphore(2)

    def until_it_is_away(*arguments: Any) -> Any:
        if not asked.acquire(blocking=False):
            raise db.OperationalError("x", None, OSError("away"))
        return ask(*arguments)

    monkeypatch.setattr(interventions, "redeliver_after", until_it_is_away)
    code, _, complaint = command("--since 2h --yes")
    assert (code, complaint) == (2, "redeliver: OSError: away (rounds asked for: 2, perhaps one more)\n")
    assert len(pending(world)) == 2


@one_database
def test_without_redis_it_works_all_the_same(api: FlaskClient, world: World, receiver: Receiver, command: Any) -> None:
    ids = end(api, receiver, 400, 400)
    redis_client._away_until = float("inf")
    assert command("--since 1h --yes")[0] == 0 and pending(world) == sorted(ids)


@one_database
def test_the_papers_lines_do_what_they_say(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """Run as they stand in docs/operations.md, in a shell."""
    (job_id,) = end(api, receiver, 400)
    paper = (ROOT / "docs" / "operations.md").read_text().split("## Calling back again")[1]
    (block,) = re.findall(r"(?ms)^```console\n(.*?)^```$", paper.split("\n## ")[0])
    told = re.findall(r"(?m)^\$ (.*)\n((?:(?!\$ ).*\n)*)", block)
    assert [line.split("python ")[1] for line, _ in told] == [
        "-m app.redeliver --since 2h", "-m app.redeliver --since 2h --yes"]
    for line, expected in told:
        ran = subprocess.run(
            line.replace(".venv/bin/python", sys.executable), shell=True, cwd=ROOT, env={**os.environ},
            capture_output=True, text=True, check=True)
        assert masked(ran.stdout, f"127.0.0.1:{receiver.port}") == masked(expected, "hooks.example:443")
    assert pending(world) == [job_id]


def masked(text: str, host: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "MOMENT", text.replace(host, "HOST"))
    return re.sub(r" +\d+$|(?<=: )\d+|\d+:\d\d:\d\d", "NUMBER", text, flags=re.M)
