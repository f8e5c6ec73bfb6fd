"""hook.log: whole lines, a bound, and duplicates that are known however often it is put aside."""
from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from hooksink import journal
from hooksink.journal import Journal
from hooksink.server import create_app
from tests.processes import ROOT
from tests.test_hooksink import SECRET, log, send, sink

__all__ = ["log", "sink"]  # the fixtures

WRITER = """
import sys
from pathlib import Path
from hooksink import journal
journal.MAX_BYTES = 60_000
log = journal.Journal(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(sum(log.accepted("j", "succeeded", f"msg_{number}") for number in range(500)))
"""


def test_a_log_that_is_full_is_put_aside_and_its_ids_are_known(
        sink: FlaskClient, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 1000)
    for number in range(20):
        send(sink, webhook_id=f"msg_{number}")
    older = log.with_name("hook.log.1")
    assert len(older.read_text().splitlines()) + len(log.read_text().splitlines()) == 20
    assert older.stat().st_size < 1200 and log.stat().st_size < 1200
    send(sink, webhook_id="msg_0")
    send(create_app().test_client(), webhook_id="msg_1")
    assert [line.split()[-1] for line in log.read_text().splitlines()[-2:]] == ["duplicate", "duplicate"]
    for number in range(100):
        send(sink, webhook_id=f"msg_{number}")
    assert sorted(file.name for file in log.parent.iterdir()) == ["hook.log", "hook.log.1"]


def test_processes_and_threads_write_whole_lines_and_know_each_others_ids(tmp_path: Path) -> None:
    """The file is put aside once here, in mid-race, so that nothing falls out of the two."""
    log = tmp_path / "hook.log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(log)], cwd=ROOT, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    assert [writer.stdout.readline() for writer in writers if writer.stdout] == ["ready\n"] * 2
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    duplicates = sum(int(writer.communicate(timeout=60)[0]) for writer in writers)
    assert all(writer.returncode == 0 for writer in writers) and duplicates == 500
    lines = [line for file in (tmp_path / "hook.log.1", log) for line in file.read_text().splitlines()]
    assert len(lines) == 1000 and all("signature=valid" in line and line.count("job_id=") == 1 for line in lines)
    assert sum(line.endswith(" duplicate") for line in lines) == 500
    kept = Journal(tmp_path / "threads.log")
    threads = [threading.Thread(target=lambda: [kept.accepted("j", "s", str(n)) for n in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (tmp_path / "threads.log").read_text()
    assert text.count("\n") == 400 and text.count(" duplicate\n") == 350


def test_a_writer_waits_for_another_processs_line_and_heeds_it(tmp_path: Path) -> None:
    """The other one holds the log, accepts the same id and puts the log aside."""
    path, said = tmp_path / "hook.log", []
    kept = Journal(path)
    writer = threading.Thread(target=lambda: said.append(kept.accepted("j", "s", "msg_1")))
    with open(path, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        other.write("2026-01-01T00:00:00.000Z job_id=j status=s webhook_id=msg_1 signature=valid\n")
        other.flush()
        path.rename(tmp_path / "hook.log.1")
    writer.join(20)
    assert said == [True] and path.read_text().endswith(" duplicate\n")


def test_memory_and_start_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 5000)
    log = tmp_path / "hook.log"
    line = "2026-01-01T00:00:00.000Z job_id=j status=succeeded webhook_id=msg_{} signature=valid\n"
    log.write_text("".join(line.format(number) for number in range(10_000)) + "\0" * 50)
    assert len(Journal(log)._seen) < 200
    monkeypatch.setattr(journal, "IDS_REMEMBERED", 20)
    kept = Journal(log)
    assert len(kept._seen) == 20 and kept.accepted("j", "s", "msg_9999") and not kept.accepted("j", "s", "msg_1")


def test_an_id_is_another_however_long_and_odd(sink: FlaskClient, log: Path) -> None:
    ids = ["a" * 101, "a" * 102, "a b", "a?b", "x" * 5000]
    assert [send(sink, webhook_id=name) for name in ids] == [204] * 5
    assert "duplicate" not in log.read_text() and all(len(line) < 300 for line in log.read_text().splitlines())
    assert send(sink, webhook_id="a b") == 204 and log.read_text().endswith(" duplicate\n")


def test_a_full_disk_is_a_500_in_one_line_and_no_duplicate_later(
        log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOOK_LOG", "/dev/full")
    sink = create_app().test_client()
    assert send(sink) == send(sink, secret="whsec_" + "A" * 32) == 500
    said = capfd.readouterr().err.splitlines()
    assert said == ["hooksink: hook.log cannot be written: No space left on device"] * 2
    assert "duplicate" not in sink.get("/").text.split("<table")[1]


def test_a_folder_that_is_gone_is_a_500_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLBACK_SECRETS", SECRET)
    monkeypatch.setenv("HOOK_LOG", str(tmp_path / "there" / "hook.log"))
    sink = create_app().test_client()
    (tmp_path / "there" / "hook.log").unlink()
    (tmp_path / "there").rmdir()
    assert send(sink) == 500
    (tmp_path / "there").mkdir()
    assert send(sink) == 204
    assert "duplicate" not in (tmp_path / "there" / "hook.log").read_text()


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, write = Journal(tmp_path / "hook.log"), os.write
    kept.accepted("j", "s", "msg_1")
    before = (tmp_path / "hook.log").read_bytes()
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, text: write(file, text[:10]))
        with pytest.raises(OSError, match="No space"):
            kept.accepted("j", "s", "msg_2")
    assert (tmp_path / "hook.log").read_bytes() == before
    assert kept.accepted("j", "s", "msg_2") is False


def test_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 200)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hook.log").symlink_to(tmp_path / "elsewhere" / "kept.log")
    kept = Journal(tmp_path / "hook.log")
    for number in range(6):
        kept.accepted("j", "s", str(number))
    assert (tmp_path / "hook.log").is_symlink()
    assert {file.name for file in (tmp_path / "elsewhere").iterdir()} == {"kept.log", "kept.log.1"}
