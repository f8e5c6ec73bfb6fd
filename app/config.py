"""Every setting, read once from the environment and `.env`. Units are in the names; reasons stand beside defaults.

Each process reads them first of all, the smallest too: libraries that judge a value are imported where it is given."""
from __future__ import annotations

import base64
import binascii
import functools
import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import WrongSetting

EVERYBODY = "everybody"  # the one owner when there are no tokens
_SECRET_SETTINGS = frozenset({"API_TOKENS", "CALLBACK_SECRETS", "FLOWER_BASIC_AUTH"})
_OWNER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")


def _split(value: Any) -> Any:
    """`a, b` as a tuple; an empty text is an empty tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Seconds = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """What the processes are told. Field names are the variables' names in lower case."""

    model_config = SettingsConfigDict(
        env_ignore_empty=True, extra="ignore", hide_input_in_errors=True, frozen=True)

    database_url: str = "sqlite:///var/jobs.sqlite3"  # follows var_dir unless given
    redis_url: str | None = None  # None: the embedded Valkey
    broker_url: str | None = None  # None: redis_url
    var_dir: Path = Path("var")  # SQLite file, Valkey's data, callback secret, hook.log, metrics
    prometheus_multiproc_dir: Path | None = None  # None: metrics in var_dir

    host: str = "127.0.0.1"
    port: int = Field(8140, ge=1, le=65535)
    web_workers: int = Field(2, ge=1, le=64)  # each has one interpreter lock; the cores of a small machine
    # With four threads forty clients that send slowly keep everybody out, with these and as many waiters they do not
    # (docs/performance.md, The server). Requests take milliseconds: more threads make nothing faster.
    web_threads: int = Field(16, ge=1, le=256)  # of each; a slow upload or a busy database holds one
    web_waiters: int = Field(16, ge=1, le=256)  # further threads of each, for answers that Prefer: wait holds back
    trusted_proxies: int = Field(0, ge=0, le=10)  # in front; whose X-Forwarded-* are believed
    rate_limit: str | None = None  # of each owner, "100/second; 2000/minute"; none: no limit
    # A client gone wild is stopped at some hundred megabytes. No table needs it: twice as many cost what empty ones do.
    max_backlog: int = Field(100_000, ge=1)  # unfinished jobs; beyond them 503
    hooksink_port: int = Field(8141, ge=1, le=65535)
    hook_log: Path | None = None  # None: hook.log in var_dir
    flower_port: int = Field(5555, ge=1, le=65535)
    flower_basic_auth: str | None = None  # user:password

    job_modules: Texts = ()
    api_tokens: Texts = ()  # name:token; none: open to whoever reaches the port

    callback_allow: Texts = ()  # host:port or CIDR; none: public addresses only
    callback_secrets: Texts = ()  # whsec_...; newest first; none: a random one is kept in var_dir
    # Three days in all, so that a receiver that fails on Friday evening is told on Monday. Soon at first: most are back
    # after a deployment.
    callback_schedule_seconds: Seconds = (0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
    # Few, since receivers are small; four keep a courier busy if it answers at once (some 900 a second), and do 80 a
    # second if it takes 50 ms.
    callback_per_host: int = Field(4, ge=1, le=1000)
    callback_timeout_seconds: float = Field(15, gt=0, le=300)  # it holds a thread, and one of the host's four places

    result_ttl_seconds: int = Field(86_400, ge=1)  # some kilobytes each; a client that was away for a night finds it
    tombstone_ttl_seconds: int = Field(30 * 86_400, ge=1)  # 200 bytes each
    idempotency_ttl_seconds: int = Field(86_400, ge=1)  # whoever repeats a submission does it within a day

    # A tick is a message and a look at the outbox. With a wake token nobody waits for one.
    relay_interval_seconds: float = Field(1, gt=0, le=3600)  # how late a submission is at most while Redis is away
    # Six heartbeats. Shorter: a process that stands still for a moment loses its job; longer: a killed one's job waits.
    lease_seconds: float = Field(30, ge=1, le=3600)  # how long a silent worker keeps its job
    rescue_interval_seconds: float = Field(5, gt=0, le=3600)  # on top of a lease; a look takes 3 to 6 ms
    prune_interval_seconds: float = Field(60, gt=0, le=86_400)  # what has expired is 410 before: only the disk waits
    # One job each: as many as use the processors at a time. Jobs that wait for others want more (docs/scaling.md).
    worker_concurrency: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=1024)
    worker_queues: Texts = ("q:jobs2",)
    worker_stop_seconds: float = Field(25, ge=0, le=86_400)  # SIGTERM to release; platforms kill after 30
    # Enough to finish a step: it can know after one (`tasks.attempt`).
    cancel_grace_seconds: float = Field(5, ge=0, le=86_400)  # what a running function gets to notice its cancellation
    courier_concurrency: int = Field(64, ge=16, le=1024)  # threads that wait on the network: four to each of 16 hosts
    # As by default. Shorter: messages of long jobs come twice.
    broker_visibility_timeout_seconds: int = Field(3600, ge=5)  # Redis brokers only; no promise hangs on it

    @model_validator(mode="before")
    @classmethod
    def _database_follows_var_dir(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("var_dir") and not given.get("database_url"):
            given["database_url"] = f"sqlite:///{Path(given['var_dir']) / 'jobs.sqlite3'}"
        return given

    @field_validator("database_url")
    @classmethod
    def _database(cls, value: str) -> str:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        if not value.startswith(("sqlite:///", "postgresql+psycopg://")):
            raise ValueError("sqlite:///<file> or postgresql+psycopg://...")
        try:
            file = make_url(value).database
        except (ArgumentError, ValueError):
            raise ValueError("sqlite:///<file> or postgresql+psycopg://user:password@host:port/database") from None
        if value.startswith("sqlite") and file in (None, "", ":memory:"):
            raise ValueError("a file: several processes share the database")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: str | None) -> str | None:
        return _url_of(value, ("redis", "rediss"), "redis://host:port/number or rediss://...")

    @field_validator("broker_url")
    @classmethod
    def _broker(cls, value: str | None) -> str | None:
        return _url_of(value, ("redis", "rediss", "amqp", "amqps"), "redis://host:port/number, rediss:// or amqp://")

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        try:
            return str(ipaddress.ip_address("127.0.0.1" if value == "localhost" else value))
        except ValueError:
            raise ValueError("an IP address to listen on, or localhost") from None

    @field_validator("api_tokens")
    @classmethod
    def _tokens(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        pairs = [part.partition(":") for part in value]
        if any(not _OWNER.fullmatch(name) or not _TOKEN.fullmatch(token) for name, _, token in pairs):
            raise ValueError("name:token, comma separated; a name is 1 to 64 of A-Z a-z 0-9 _ . -, a token of "
                             "A-Z a-z 0-9 - . _ ~ + / with = at its end (RFC 6750 2.1)")
        if any(name == EVERYBODY for name, _, _ in pairs):
            raise ValueError(f"the name {EVERYBODY} is that of the open API")
        if len({name for name, _, _ in pairs}) < len(pairs) or len({token for _, _, token in pairs}) < len(pairs):
            raise ValueError("each name and each token once")
        return value

    @field_validator("rate_limit")
    @classmethod
    def _rate(cls, value: str | None) -> str | None:
        if value is None:
            return None
        from limits import parse_many

        try:
            limits = parse_many(value)
            fits = all(0 < limit.amount < 2**31 and limit.get_expiry() < 2**31 for limit in limits)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError("limits such as 100/second; 2000/minute")
        return value

    @field_validator("callback_allow")
    @classmethod
    def _allow(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            match = _HOST_PORT.fullmatch(entry)
            if match and 1 <= int(match[2]) <= 65535:
                continue
            try:
                ipaddress.ip_network(entry)
            except ValueError:
                raise ValueError("host:port or CIDR, comma separated") from None
        return value

    @field_validator("callback_secrets")
    @classmethod
    def _secrets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for secret in value:
            check_secret(secret)
        return value

    @field_validator("callback_schedule_seconds")
    @classmethod
    def _schedule(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not 1 <= len(value) <= 100 or any(not 0 <= seconds <= 7 * 86_400 for seconds in value):
            raise ValueError("1 to 100 whole numbers of seconds, comma separated, each 0 to 604800")
        return value

    @field_validator("worker_queues")
    @classmethod
    def _queues(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or {"relay", "callbacks"} & set(value):
            raise ValueError("at least one queue, and neither relay nor callbacks: those are the courier's")
        return value

    @model_validator(mode="after")
    def _open_only_at_home(self) -> Settings:
        if not self.api_tokens and not ipaddress.ip_address(self.host).is_loopback:
            raise ValueError(f"HOST={self.host}: an address beyond loopback needs API_TOKENS (name:token, ...)")
        return self


def _url_of(value: str | None, schemes: tuple[str, ...], allowed: str) -> str | None:
    """The URL, when its scheme is one of these, and its port and (for Redis) its database are numbers."""
    if value is None:
        return None
    from redis import ConnectionPool

    try:
        parts = urlsplit(value)
        well = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
        if parts.scheme.startswith("redis"):
            well = well and (parts.path in ("", "/") or parts.path[1:].isdecimal())
            ConnectionPool.from_url(value).make_connection()  # which connects later
    except (TypeError, ValueError):
        well = False
    if not well:
        raise ValueError(allowed)
    return value


def check_secret(secret: str) -> None:
    """Refuses what Standard Webhooks does not call a secret: `whsec_` and the strict base64 of 24 to 64 bytes.

    Raises ValueError. Libraries decode leniently, each in its way: with a mistyped secret, two of them would use
    different keys.
    """
    text = secret.removeprefix("whsec_")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    as_written = secret.startswith("whsec_") and base64.b64encode(raw).decode() == text
    if not as_written or not 24 <= len(raw) <= 64:
        raise ValueError("whsec_ and the base64 of 24 to 64 bytes, comma separated, newest first")


def _one_line(error: ValidationError) -> str:
    """Variable, value and what is allowed; the values of secrets stay out."""
    first = error.errors()[0]
    allowed = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return allowed
    variable = str(first["loc"][0]).upper()
    shown = "(hidden)" if variable in _SECRET_SETTINGS else repr(without_secrets(_given(variable)))
    return f"{variable}={shown} cannot be used: {allowed}"


def without_secrets(url: str) -> str:
    """A URL, well-formed or not, without what may be a password in it."""
    scheme, user = re.match(r"([^:/]*:?/{0,2})(.*)@|", url, re.DOTALL).groups()  # type: ignore[union-attr]
    if user and ":" in user:
        url = url.replace(f"{scheme}{user}@", f"{scheme}***@", 1)
    return re.sub(r"\?.*", "?***", url, flags=re.DOTALL)


def _given(variable: str) -> str:
    from dotenv import dotenv_values

    merged = {name.upper(): value for name, value in {**dotenv_values(env_file()), **os.environ}.items()}
    return merged.get(variable) or ""


def env_file() -> str:
    """The file of settings beside the environment: ENV_FILE, `.env` by default."""
    return os.environ.get("ENV_FILE", ".env") or os.devnull


@functools.lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process. Raises WrongSetting with one line when a value cannot be used."""
    try:
        return Settings(_env_file=env_file())
    except ValidationError as error:
        raise WrongSetting(_one_line(error)) from None


def redis_url() -> str:
    """Where the view lives: REDIS_URL, or the embedded server's address."""
    from app import embedded

    return settings().redis_url or embedded.url()


def broker_url() -> str:
    """Where Celery's messages go: BROKER_URL, or the same Redis."""
    return settings().broker_url or redis_url()
