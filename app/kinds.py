"""What a kind of job is, and the registry of kinds: the built-in ones and those of JOB_MODULES, made alike."""
from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin

from pydantic import AliasChoices, AliasPath, BaseModel, RootModel

from app.config import settings
from app.errors import UketsukeError, WrongKind

BUILT_IN = ("tasks.primes", "tasks.history")
MAX_RESULT_BYTES = 256 * 1024

_RESERVED_MEMBERS = frozenset({"kind", "callback_url"})
_QUEUE = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_LONGEST_SECONDS = 7 * 86_400
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


class Refused(UketsukeError):
    """Raised by a kind's function: this job fails at once with `error.code = "refused"` and this message."""


class Job(Protocol):
    """What a kind's function may ask of the attempt that it runs in."""

    @property
    def id(self) -> str:
        """The job's id, the same in every attempt."""

    @property
    def attempt(self) -> int:
        """Which try this is, counted from 1."""

    def progress(self, done: int, total: int) -> None:
        """Tells clients how far the job is. Cheap: call it as often as you like."""

    def cancelled(self) -> bool:
        """Whether this attempt should stop, since its result is no longer wanted: the job was cancelled, or this is no
        longer its attempt. A function that goes on is interrupted after CANCEL_GRACE_SECONDS."""


@dataclass(frozen=True)
class Kind:
    """A sort of job: its name, what it takes, the function that does it, and its limits."""

    name: str
    input: type[BaseModel]
    function: Callable[..., Any]
    max_attempts: int
    time_limit: float  # seconds
    queue: str
    transactional: bool
    together: bool
    public: bool  # whether POST /jobs takes it


_registered: dict[str, Kind] = {}


def kind(
    name: str,
    input: type[BaseModel],
    *,
    max_attempts: int = 3,
    time_limit: float = 300,
    queue: str = "q:jobs2",
    transactional: bool = False,
    together: bool = False,
    public: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function a kind of job. It is called with the validated input and a `Job`; its return value, JSON of at
    most 256 KiB, is the job's result.

    max_attempts: tries, counted from 1, before an exception or a crash is final.
    time_limit: seconds for one try, enforced. Jobs of kinds that take moments share messages and run one after another:
        what kills its process, or never lets another thread run, delays the others of its message.
    queue: the Celery queue; one of its own needs a worker with WORKER_QUEUES.
    transactional: the function gets the finishing transaction as a third argument, an SQLAlchemy Connection: its rows
        and the job's success are one commit. It may touch nothing but SQL, and is short.
    together: the function takes milliseconds, so that several jobs may share a transaction too, each in a savepoint of
        its own; only of transactional kinds. Such a job may never be seen running, tells no progress, and
        is not cancelled once its transaction has begun. Each fails, and is tried again, alone.
    public: False for kinds that POST /jobs refuses.

    Raises WrongKind when the registry cannot take it.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _add(Kind(name, input, function, max_attempts, time_limit, queue, transactional, together, public))
        return function

    return register


def _add(new: Kind) -> None:
    if not _NAME.fullmatch(new.name):
        raise WrongKind(f"kind {new.name!r}: a name is 1 to 64 of A-Z a-z 0-9 _ . - and begins with a letter")
    if new.name in _registered:
        taken = _registered[new.name].function
        raise WrongKind(f"kind {new.name!r} of {new.function.__module__} is taken by {taken.__module__}")
    if reserved := sorted(_members(new.input) & _RESERVED_MEMBERS):
        raise WrongKind(f"kind {new.name!r}: its input has a member called {reserved[0]}, which belongs to the job")
    if not 1 <= new.max_attempts <= 1000:
        raise WrongKind(f"kind {new.name!r}: max_attempts is 1 to 1000")
    if not 0 < new.time_limit <= _LONGEST_SECONDS:
        raise WrongKind(f"kind {new.name!r}: time_limit is more than 0 and at most {_LONGEST_SECONDS} seconds")
    if not _QUEUE.fullmatch(new.queue) or new.queue in ("relay", "callbacks"):
        raise WrongKind(f"kind {new.name!r}: a queue is 1 to 100 of A-Z a-z 0-9 _ . : -, and not the courier's")
    if new.together and not new.transactional:
        raise WrongKind(f"kind {new.name!r}: together is for transactional kinds")
    _registered[new.name] = new


def _members(model: type[BaseModel]) -> set[str]:
    """Every name under which a member may be given."""
    if issubclass(model, RootModel):
        return {name for found in _models_in(model.model_fields["root"].annotation) for name in _members(found)}
    names: set[str] = set()
    for field, info in model.model_fields.items():
        names |= {field, info.alias or field}
        validation = info.validation_alias
        for alias in validation.choices if isinstance(validation, AliasChoices) else [validation]:
            names.add(str(alias.path[0] if isinstance(alias, AliasPath) else alias))
    return names


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Those that a value of this type may be, of a union each."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [model for choice in get_args(annotation) for model in _models_in(choice)]
    return []


@functools.lru_cache(maxsize=1)
def registry() -> Mapping[str, Kind]:
    """This process's kinds by name: those of the built-in modules, then those of JOB_MODULES.

    Raises WrongKind with one line when a module cannot be imported or registers what cannot be registered.
    """
    for module in (*BUILT_IN, *settings().job_modules):
        try:
            importlib.import_module(module)
        except WrongKind:
            raise
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise WrongKind(f"JOB_MODULES: {module} cannot be imported: {why}") from error
    return _registered


def read_input(kind: Kind, text: str) -> BaseModel:
    """The input of a job from its JSON text: unknown members are refused, and texts are not taken for numbers.

    Raises `pydantic.ValidationError`.
    """
    return kind.input.model_validate_json(text, strict=True, extra="forbid")
