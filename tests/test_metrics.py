"""/metrics: each thing that happens is counted once, wherever it happens, and what dies takes no count with it."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from app import clock, db, gauges, metrics, ports, presence, redis_client
from tasks import deliver_webhook, rescue_stalled, run_job
from tests import receiver as receivers
from tests.conftest import World, one_database
from tests.processes import ROOT, Site
from tests.running import a_kind, die_in_mid_job, later, relay, run_to_end, submit
from tests.servers import wait_until

Figures = dict[tuple[str, tuple[str, ...]], float]


def figures(text: str) -> Figures:
    """Every sample that is not zero, by name and label values."""
    return {(sample.name, tuple(sample.labels.values())): sample.value
            for family in parse(text) for sample in family.samples if sample.value}


def scraped(api: FlaskClient) -> Figures:
    gauges.forget()
    answer = api.get("/metrics")
    assert answer.status_code == 200
    return figures(answer.text)


def counted(now: Figures, *names: str) -> Figures:
    """Those of these metrics."""
    return {sample: value for sample, value in now.items() if sample[0].removeprefix("uketsuke_") in names}


# --- what is counted ---


@one_database
def test_each_step_of_a_job_is_counted_once(api: FlaskClient, world: World, receiver: receivers.Receiver) -> None:
    body = {"n": 5, "callback_url": f"{receiver.url}/"}
    first = api.post("/jobs", json=body, headers={"Idempotency-Key": "k"})
    api.post("/jobs", json=body, headers={"Idempotency-Key": "k"})
    api.post("/jobs", json={"n": "many"})
    relay()
    run_to_end(first.json["job_id"])
    run_job.run_once(first.json["job_id"])  # a repeated message
    [(_, delivery_id)] = relay(later(1))
    deliver_webhook.run_once(delivery_id, now=lambda: later(1))
    seen = scraped(api)
    assert counted(
        seen, "submissions_total", "replays_total", "refusals_total", "jobs_ended_total", "job_wait_seconds_count",
        "job_run_seconds_count", "messages_published_total", "delivery_attempts_total",
        "delivery_attempt_seconds_count",
    ) == {
        ("uketsuke_submissions_total", ("primes",)): 1, ("uketsuke_replays_total", ()): 1,
        ("uketsuke_refusals_total", ("invalid-input",)): 1,
        ("uketsuke_jobs_ended_total", ("", "primes", "succeeded")): 1,
        ("uketsuke_job_wait_seconds_count", ("primes",)): 1, ("uketsuke_job_run_seconds_count", ("primes",)): 1,
        ("uketsuke_messages_published_total", ("run_job",)): 1,
        ("uketsuke_messages_published_total", ("deliver_webhook",)): 1,
        ("uketsuke_delivery_attempts_total", ("delivered",)): 1, ("uketsuke_delivery_attempt_seconds_count", ()): 1}
    assert counted(seen, "http_requests_total") == {
        ("uketsuke_http_requests_total", ("POST", "/jobs", "202")): 2,
        ("uketsuke_http_requests_total", ("POST", "/jobs", "422")): 1}


@one_database
def test_a_job_that_fails_after_two_attempts_ended_once(api: FlaskClient, world: World) -> None:
    def give_up(input: Any, job: Any) -> None:
        raise LookupError("no luck")

    with a_kind(give_up, max_attempts=2) as kind:
        run_to_end(submit(api, kind))
    seen = counted(scraped(api), "jobs_ended_total", "job_wait_seconds_count", "job_run_seconds_count")
    assert seen == {
        ("uketsuke_jobs_ended_total", ("exception", kind, "failed")): 1,
        ("uketsuke_job_wait_seconds_count", (kind,)): 1, ("uketsuke_job_run_seconds_count", (kind,)): 2}


@one_database
def test_what_the_rescue_ends_is_counted_there(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: None, max_attempts=1) as kind:
        die_in_mid_job(submit(api, kind))
        rescue_stalled.run_once(later(60), {})
        rescue_stalled.run_once(later(120), {})
    assert counted(scraped(api), "jobs_ended_total", "rescues_total", "job_run_seconds_count") == {
        ("uketsuke_jobs_ended_total", ("crashed", kind, "failed")): 1, ("uketsuke_rescues_total", ("job",)): 1}


@one_database
def test_what_was_rolled_back_is_not_counted(api: FlaskClient, world: World) -> None:
    world.sql("CREATE TRIGGER no BEFORE INSERT ON outbox BEGIN SELECT RAISE(ABORT, 'no'); END")
    assert api.post("/jobs", json={"n": 5}).status_code == 500
    assert counted(scraped(api), "submissions_total", "refusals_total") == {
        ("uketsuke_refusals_total", ("internal",)): 1}


def test_states_are_read_from_sql(api: FlaskClient, world: World) -> None:
    waiting, running = submit(api, n=5), submit(api, n=6)
    api.post("/notes", json={"text": "x"})
    relay()
    world.sql("UPDATE outbox SET state = 'waiting', published_at = NULL, available_at = :then WHERE target_id = :id",
              then=later(-100), id=waiting)
    world.sql("UPDATE jobs SET created_at = :then WHERE id = :id", then=later(-200), id=waiting)
    die_in_mid_job(running)
    presence.relay_ran(later(-50))
    seen = scraped(api)
    assert counted(seen, "unfinished_jobs", "outbox_rows", "unfinished_deliveries", "reachable") == {
        ("uketsuke_unfinished_jobs", ("primes", "queued")): 1, ("uketsuke_unfinished_jobs", ("primes", "running")): 1,
        ("uketsuke_unfinished_jobs", ("history", "queued")): 1,
        ("uketsuke_outbox_rows", ("waiting",)): 1, ("uketsuke_outbox_rows", ("published",)): 1,
        ("uketsuke_reachable", ("database",)): 1, ("uketsuke_reachable", ("redis",)): 1}
    for name, age in (("outbox_oldest_due", 100), ("oldest_unfinished_job", 200), ("relay_last_run", 50)):
        assert age <= seen[f"uketsuke_{name}_seconds", ()] < age + 30


def test_callbacks_and_parked_rows_are_read_from_sql(
    api: FlaskClient, world: World, receiver: receivers.Receiver,
) -> None:
    for _ in range(2):
        run_to_end(submit(api, n=5, callback_url=f"{receiver.url}/"))
    world.sql("UPDATE outbox SET state = 'parked' WHERE id = (SELECT min(id) FROM outbox)")
    assert counted(scraped(api), "unfinished_deliveries", "outbox_rows", "unfinished_jobs") == {
        ("uketsuke_unfinished_deliveries", ("pending",)): 2,
        ("uketsuke_outbox_rows", ("waiting",)): 1, ("uketsuke_outbox_rows", ("parked",)): 1}


@one_database
def test_who_scrapes_again_within_a_second_does_not_ask_the_database_again(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(gauges, "_of_database", lambda now: (asked.append(now) or [], True))
    monkeypatch.setattr(gauges, "FRESH_SECONDS", 3600)
    gauges.forget()
    for _ in range(3):
        api.get("/metrics")
    assert len(asked) == 1
    monkeypatch.setattr(gauges, "FRESH_SECONDS", 0)
    api.get("/metrics")
    assert len(asked) == 2


def test_counting_reads_what_is_unfinished_and_no_finished_row(world: World) -> None:
    """Each table is read through the index of its unfinished rows; the outbox has no others."""
    before = "EXPLAIN " if world.dialect == "postgresql" else "EXPLAIN QUERY PLAN "
    with db.reading() as view:
        if world.dialect == "postgresql":
            view.exec_driver_sql("SET enable_seqscan = off")  # which few rows are worth
        plans = []
        for question in (gauges._by_kind, gauges._of_deliveries):
            text = str(question.compile(view.engine, compile_kwargs={"literal_binds": True}))
            plans += [str(row) for row in view.exec_driver_sql(before + text)]
    told = "".join(plans)
    assert len(re.findall("ix_jobs_unfinished", told)) == 1 and len(set(re.findall(r"ix_deliveries_\w+", told))) == 2
    assert not re.search("Seq Scan|SCAN (jobs|deliveries)(?! USING (COVERING )?INDEX ix_)", told)


# --- what may be seen ---


@one_database
def test_the_papers_name_every_metric(api: FlaskClient, world: World, receiver: receivers.Receiver) -> None:
    presence.relay_ran(clock.now())
    api.get("/nowhere")
    text = api.get("/metrics").text
    text = api.get("/metrics").text  # which shows the request before it
    scraped_now = {}
    for family in parse(text):
        name = family.name + "_total" * (family.type == "counter")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        scraped_now[name] = (family.type, labels, family.documentation)
    table = (ROOT / "docs" / "operations.md").read_text()
    told = {
        name: (sort, set(re.findall(r"`(\w+)`", labels)), meaning)
        for name, sort, labels, meaning in re.findall(r"\| `(uketsuke_\w+)` \| (\w+) \|(.*?)\| (.*?) \|\n", table)}
    assert told == scraped_now
    assert list(told) == [what.name for what in (*metrics.COUNTED, *gauges.READ)]


@one_database
def test_openmetrics_is_given_to_whoever_asks(api: FlaskClient, world: World) -> None:
    submit(api, n=5)
    answer = api.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.content_type.startswith("application/openmetrics-text")
    assert "uketsuke_submissions" in {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
    plain = api.get("/metrics")
    assert plain.content_type.startswith("text/plain; version=") and plain.headers["Vary"] == "Accept"
    assert api.head("/metrics").status_code == 200


@one_database
def test_labels_are_closed_sets(api: FlaskClient, world: World) -> None:
    """Neither what is asked for, nor how, nor by whom makes a series."""
    world.set(API_TOKENS="alice:sesame")
    headers = {"Authorization": "Bearer sesame"}
    job_id = api.post("/jobs", json={"n": 5}, headers=headers).json["job_id"]
    for method in ("GET", "BREW", "SEEK"):
        for path in (f"/jobs/{job_id}", "/jobs/never-heard-of", "/elsewhere?secret=1"):
            api.open(path, method=method, headers=headers)
    text = api.get("/metrics", headers=headers).text
    assert not re.search(f"{job_id}|never-heard|elsewhere|BREW|SEEK|alice|sesame|secret", text)
    assert {labels[:2] for name, labels in figures(text) if name == "uketsuke_http_requests_total"} == {
        ("POST", "/jobs"), ("GET", "/jobs/<job_id>"), ("GET", "none"), ("other", "none")}
    assert {labels for name, labels in figures(text) if name == "uketsuke_refusals_total"} == {
        ("not-found",), ("method-not-allowed",)}


@one_database
def test_a_scrape_needs_a_token_where_there_are_some(api: FlaskClient, world: World) -> None:
    world.set(API_TOKENS="alice:sesame")
    assert api.get("/metrics").status_code == 401
    assert api.get("/metrics", headers={"Authorization": "Bearer sesame"}).status_code == 200


# --- what is away ---


@one_database
def test_a_scrape_without_the_database_tells_what_is_known(api: FlaskClient, world: World) -> None:
    submit(api, n=5)
    metrics_before = counted(scraped(api), "submissions_total")
    world.set(DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    db.dispose()
    seen = scraped(api)
    assert counted(seen, "submissions_total") == metrics_before != {}
    assert counted(seen, "reachable") == {("uketsuke_reachable", ("redis",)): 1}
    assert not counted(seen, "unfinished_jobs", "outbox_rows")
    db.dispose()


@one_database
def test_a_scrape_without_redis_tells_what_is_known(api: FlaskClient, world: World) -> None:
    world.set(REDIS_URL="redis://127.0.0.1:1/0")
    redis_client._client.cache_clear()
    try:
        submit(api, n=5)
        seen = scraped(api)
        assert counted(seen, "unfinished_jobs", "reachable", "relay_last_run_seconds") == {
            ("uketsuke_unfinished_jobs", ("primes", "queued")): 1, ("uketsuke_reachable", ("database",)): 1}
    finally:
        redis_client._client.cache_clear()


@one_database
def test_a_folder_that_cannot_be_written_stops_nothing(api: FlaskClient, world: World) -> None:
    world.set(PROMETHEUS_MULTIPROC_DIR="/dev/null/metrics")
    run_to_end(submit(api, n=5))
    seen = scraped(api)
    assert not counted(seen, "submissions_total") and counted(seen, "reachable", "unfinished_jobs") == {
        ("uketsuke_reachable", ("database",)): 1, ("uketsuke_reachable", ("redis",)): 1}


@one_database
@pytest.mark.parametrize("content", [
    b"", b"\xff" * 300_000, b"\x40" + bytes(7) + b"\x08\x00\x00\x00{nothing" + bytes(300_000)])
def test_a_damaged_file_costs_its_own_figures(api: FlaskClient, world: World, content: bytes) -> None:
    submit(api, n=5)
    (metrics.folder() / "counter_7.db").write_bytes(content)
    assert counted(scraped(api), "submissions_total") == {("uketsuke_submissions_total", ("primes",)): 1}
    metrics.forget()
    (metrics.folder() / "counter_0.db").write_bytes(content)  # which this process takes again
    submit(api, n=5)
    assert counted(scraped(api), "submissions_total") == {("uketsuke_submissions_total", ("primes",)): 1}


# --- processes ---

_DYING = """
import os, signal
from app import metrics
metrics.submitted("primes")
for generation in range(int(os.environ["GENERATIONS"])):
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            for _ in range(10):
                metrics.submitted("primes")
            os.kill(os.getpid(), signal.SIGKILL)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    metrics.submitted("primes")
os.kill(os.getpid(), signal.SIGKILL)
"""


def _dying(generations: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "GENERATIONS": str(generations)}
    return subprocess.Popen([sys.executable, "-c", _DYING], cwd=ROOT, env=environment)


@one_database
def test_no_count_dies_with_its_process_and_files_are_used_again(api: FlaskClient, world: World) -> None:
    """Processes that fork and are killed, while somebody scrapes all the time."""
    seen: list[float] = []
    for number in range(2):
        process = _dying(8)
        while process.poll() is None:
            seen.append(counted(scraped(api), "submissions_total").get(("uketsuke_submissions_total", ("primes",)), 0))
        assert process.wait() == -signal.SIGKILL
    seen.append(scraped(api)["uketsuke_submissions_total", ("primes",)])
    assert seen[-1] == 2 * (1 + 8 * 31) and seen == sorted(seen)
    names = sorted(file.name for file in metrics.folder().iterdir())
    places = {name.split(".")[0].split("_")[-1] for name in names}
    assert places == {"0", "1", "2", "3", "4"} and len(names) == 15  # this process, the parent, three children


def of_site(site: Site) -> Figures:
    """A scrape over a connection of its own: whichever process takes it."""
    with site.client() as client:
        answer = client.get(f"{site.api}/metrics", timeout=30)
    assert answer.status_code == 200
    return figures(answer.text)


@pytest.mark.acceptance
@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_the_figures_add_up_across_web_processes_and_survive_a_killed_worker(site: Site) -> None:
    site.env |= {"WEB_WORKERS": "3", "PROMETHEUS_MULTIPROC_DIR": str(site.folder / "counts")}
    rest = site.start("web", "courier", "beat", "flower")
    site.wait_answering()

    def submit_some(_: int) -> None:
        for _ in range(5):
            with site.client() as client:  # a connection of its own
                assert client.post(f"{site.api}/jobs", json={"n": 5}, timeout=30).status_code == 202

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(submit_some, range(8)))
    for _ in range(8):
        assert of_site(site)["uketsuke_submissions_total", ("primes",)] == 40
    assert _processes_that_counted(site.folder / "counts", "primes") >= 2

    worker = site.start_alone("worker")
    ended = ("uketsuke_jobs_ended_total", ("", "primes", "succeeded"))
    wait_until(lambda: of_site(site).get(ended) == 40, 60, "40 ended")
    napping = site.submit(kind="nap", seconds=60)
    wait_until(lambda: site.get(f"/jobs/{napping}").json()["status"] == "running", 30, "it runs")
    before = of_site(site)
    for child in worker.family()[1:]:
        child.kill()
    wait_until(lambda: of_site(site).get(("uketsuke_rescues_total", ("job",))) == 1, 60, "it is rescued")
    after = of_site(site)
    gone_down = {sample: value for sample, value in before.items() if "_total" in sample[0] and value > after[sample]}
    assert not gone_down and after[ended] == 40 and after["uketsuke_job_run_seconds_count", ("primes",)] == 40
    wait_until(lambda: not ports.is_free("127.0.0.1", site.flower_port), 30, "flower listens")
    for file in (site.folder / "counts").iterdir():  # Flower has metrics of its own, and is no process of ours
        assert re.fullmatch(r"[0-9]\.lock|(counter|histogram)_[0-9]\.db", file.name)
    worker.kill()
    rest.kill()


def _processes_that_counted(folder: Path, kind: str) -> int:
    """How many of the files hold submissions of this kind."""
    from prometheus_client.multiprocess import MultiProcessCollector

    return sum(any(sample.name == "uketsuke_submissions_total" and sample.labels == {"kind": kind} and sample.value
                   for metric in MultiProcessCollector.merge([str(file)]) for sample in metric.samples)
               for file in folder.glob("counter_*.db"))
