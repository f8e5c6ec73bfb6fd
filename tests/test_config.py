"""Settings: a wrong one stops the start with one line that names it, and a right one is described in the README."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app import config, signing
from app.errors import WrongSetting
from tests.conftest import forget_settings

ROOT = Path(__file__).parent.parent
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    for name in config.Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    forget_settings()
    yield
    forget_settings()


@pytest.mark.parametrize("name,value", [
    ("DATABASE_URL", "mysql://x"), ("DATABASE_URL", "sqlite:///:memory:"), ("REDIS_URL", "localhost"),
    ("BROKER_URL", "sqs://"), ("PORT", "0"), ("PORT", "65536"), ("PORT", "x"), ("LEASE_SECONDS", "0"),
    ("LEASE_SECONDS", "nan"), ("RELAY_INTERVAL_SECONDS", "-1"), ("CALLBACK_SCHEDULE_SECONDS", "1,x"),
    ("CALLBACK_SCHEDULE_SECONDS", "-1"), ("CALLBACK_PER_HOST", "0"), ("CALLBACK_ALLOW", "127.0.0.1"[:-1] + "x"),
    ("CALLBACK_ALLOW", "127.0.0.1:0"), ("CALLBACK_ALLOW", "10.0.0.0/33"), ("WORKER_QUEUES", "relay"),
    ("HOST", "example.com"), ("DATABASE_URL", "postgresql+psycopg://u@h:bad/x"), ("REDIS_URL", "redis://x/abc"),
    ("REDIS_URL", "unix:///x"), ("BROKER_URL", "redis://a:b:c"), ("REDIS_URL", "redis://h:notaport/0"),
    ("WORKER_CONCURRENCY", "0"), ("RESULT_TTL_SECONDS", "0"),
])
def test_a_wrong_value_names_the_variable_the_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str,
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongSetting) as raised:
        config.settings()
    line = str(raised.value)
    assert "\n" not in line and line.startswith(f"{name}={value!r} cannot be used: ") and len(line) > len(name) + 25


@pytest.mark.parametrize("name,value", [
    ("CALLBACK_SECRETS", "whsec_c2hvcnQ="), ("CALLBACK_SECRETS", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    ("CALLBACK_SECRETS", SECRET + "!"), ("CALLBACK_SECRETS", "whsec_" + "A" * 200), ("API_TOKENS", "onlyatoken"),
    ("API_TOKENS", "a:same,b:same"), ("API_TOKENS", "a:t=k=b"), ("API_TOKENS", "a:tök"),
    ("API_TOKENS", "everybody:token"), ("API_TOKENS", "a:x,a:y"), ("API_TOKENS", "a:"),
])
def test_a_wrong_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongSetting) as raised:
        config.settings()
    assert str(raised.value).startswith(f"{name}=(hidden) cannot be used: ")
    assert value not in str(raised.value)


@pytest.mark.parametrize("name,value", [
    ("DATABASE_URL", "postgresql://bob:S3cret@h/db"), ("DATABASE_URL", "postgresql+psycopg://b:c@S3cret@h:bad/x"),
    ("REDIS_URL", "redis://:S3cret@h:99999/0"), ("REDIS_URL", "http://:S3cret@h/0"),
    ("BROKER_URL", "amqps//b:S3cret@h"), ("REDIS_URL", "redis://127.0.0.1/0?password=S3cret&x=1"),
])
def test_a_password_in_a_wrong_url_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongSetting, match=f"^{name}='.*[*][*][*].*' cannot be used: ") as raised:
        config.settings()
    assert "S3cret" not in str(raised.value)


@pytest.mark.parametrize("host,tokens,starts", [
    ("127.0.0.1", "", True), ("::1", "", True), ("localhost", "", True), ("0.0.0.0", "", False), ("::", "", False),
    ("192.168.1.5", "", False), ("0.0.0.0", "ada:secret", True),
])
def test_an_open_api_stays_on_loopback(monkeypatch: pytest.MonkeyPatch, host: str, tokens: str, starts: bool) -> None:
    monkeypatch.setenv("HOST", host)
    monkeypatch.setenv("API_TOKENS", tokens)
    if starts:
        assert config.settings().host == {"localhost": "127.0.0.1"}.get(host, host)
    else:
        with pytest.raises(WrongSetting, match="API_TOKENS"):
            config.settings()


def test_the_environment_goes_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ENV_FILE")
    (tmp_path / ".env").write_text("PORT=9001\nWEB_THREADS=7\nSOMETHING_ELSE=1\n")
    monkeypatch.setenv("PORT", "9002")
    assert (config.settings().port, config.settings().web_threads) == (9002, 7)


def test_a_secret_is_made_once_and_kept(tmp_path: Path) -> None:
    first = signing.callback_secrets()
    forget_settings()
    assert signing.callback_secrets() == first
    config.check_secret(first[0])
    kept = tmp_path / "var" / "callback_secret"
    assert kept.stat().st_mode & 0o077 == 0
    assert [file.name for file in kept.parent.iterdir()] == ["callback_secret"]


def test_a_process_with_a_wrong_setting_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "x")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for line in ("app.api", "app.stack", "tasks beat", "app.embedded"):
        ran = subprocess.run([sys.executable, "-m", *line.split()], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
        assert "PORT='x' cannot be used" in ran.stderr


def test_every_setting_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [name.upper() for name in config.Settings.model_fields if f"`{name.upper()}`" not in readme]
    assert missing == []
