"""What the API answers, as pydantic models. They describe: the routes write their JSON by hand, and tests hold both
together."""
from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, RootModel
from pydantic.json_schema import SkipJsonSchema

from app import excerpts, ids

Some = TypeVar("Some")
# Of a member that is left out when it has no meaning; it is never null.
Maybe = Annotated[Union[Some, SkipJsonSchema[None]], Field(default=None)]

JOB_ID = "01a2291c-4328-73fb-86ef-c5a9895026da"

JobId = Annotated[str, Field(
    pattern=f"^{ids.PATTERN}$", description="The job's id.", examples=[JOB_ID], json_schema_extra={"format": "uuid"})]
Moment = Annotated[str, Field(
    pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$",
    description="RFC 3339 in UTC, with milliseconds.", json_schema_extra={"format": "date-time"})]
NoteId = Annotated[int, Field(ge=1, le=2**31 - 1, description="The note's id.")]
Kind = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_.-]{0,63}$", description="What sort of job it is.")]
Count = Annotated[int, Field(ge=0)]


class Answer(BaseModel):
    """No member that is not described here."""

    model_config = ConfigDict(extra="forbid")


class Accepted(Answer):
    """The job is kept and will reach a final status."""

    job_id: JobId
    status: Literal["queued"]


class NoteAccepted(Answer):
    """The note is kept, and its history will be written."""

    id: NoteId
    text: str
    job_id: JobId
    status_url: str = Field(description="Where the history's job is polled.")


class Progress(Answer):
    """How far the function says that it is, in units of its own."""

    done: Count
    total: Count


class JobError(Answer):
    """Why the job failed."""

    code: Literal["exception", "refused", "timeout", "crashed", "bad_result", "cancelled"] = Field(
        description="`exception`: the function raised; `refused`: it refused; `timeout`: it took too long; `crashed`: "
                    "its process died; `bad_result`: what it returned is no result; `cancelled`: somebody wanted that.")
    message: str


class Callback(Answer):
    """How far the telling of the job's end is."""

    status: Literal["pending", "sending", "delivered", "exhausted", "gone", "refused"]
    attempts: Count
    next_attempt_at: Maybe[Moment]
    last_response: Maybe[Annotated[int, Field(ge=100, le=999, description="The receiver's last status code.")]]


class _Job(Answer):
    job_id: JobId
    kind: Kind
    attempt: Annotated[Count, Field(description="Which try this is, counted from 1; 0 before the first.")]
    created_at: Moment
    note_id: Maybe[NoteId]
    callback: Maybe[Callback]


class QueuedJob(_Job):
    """Waits for a worker."""

    status: Literal["queued"]
    started_at: Maybe[Moment]


class RunningJob(_Job):
    """A worker has it."""

    status: Literal["running"]
    started_at: Moment
    progress: Maybe[Progress]


class SucceededJob(_Job):
    """Done: what the function returned is the result."""

    status: Literal["succeeded"]
    started_at: Moment
    finished_at: Moment
    expires_at: Moment
    result: Any = Field(description="JSON, of at most 256 KiB.")


class FailedJob(_Job):
    """Not done, and not tried again."""

    status: Literal["failed"]
    started_at: Maybe[Moment]
    finished_at: Moment
    expires_at: Moment
    error: JobError


AnyJob = Annotated[QueuedJob | RunningJob | SucceededJob | FailedJob, Field(discriminator="status")]


class Job(RootModel[AnyJob]):
    """A job as it is now. A member is there only when it has meaning."""


class JobList(Answer):
    """A page of jobs, the newest first."""

    jobs: list[Job]


class DeliveryAttempt(Answer):
    """One try to tell a job's end to its callback address."""

    webhook_id: str = Field(description="The `webhook-id` of its delivery, the same in each of its attempts.")
    attempt: int = Field(ge=1, description="Which try of this delivery it is, counted from 1.")
    at: Annotated[Moment, Field(description="When it began, or was found interrupted: RFC 3339 in UTC, milliseconds.")]
    response_code: int | None = Field(ge=100, le=999, description="The status code; null when there was none.")
    error: str | None = Field(
        description="Why there was no whole answer, in one line of safe text; null when there was one.")
    duration_seconds: float = Field(
        ge=0, description="Seconds from its beginning to the end of the answer; 0 when it was interrupted.")
    excerpt: str | None = Field(
        max_length=excerpts.MAX_BYTES, description="The first 1,024 bytes of the answer's body as UTF-8, U+FFFD for "
        "what is unsafe to show; null without a whole answer, and when it was compressed.")


class Endpoint(Answer):
    """How the callback address (without its query) has answered lately, to whatever job."""

    standing: Literal["well", "slow", "failing"]
    failures: Count = Field(description="Failed attempts in a row.")
    failing_since: Maybe[Moment]
    paused_until: Maybe[Annotated[Moment, Field(description="It has failed for long: no attempt is made before then.")]]


class DeliveryList(Answer):
    """Every try, the oldest first."""

    deliveries: list[DeliveryAttempt]
    endpoint: Maybe[Endpoint]


class Redelivery(Answer):
    """One more round of attempts begins."""

    job_id: JobId
    callback: Callback


class Note(Answer):
    """A note as it was left."""

    id: NoteId
    text: str
    created_at: Moment


class NoteList(Answer):
    """A page of notes, the newest first."""

    notes: list[Note]


class Event(Answer):
    """A line of a note's history."""

    kind: Literal["created"]
    job_id: JobId
    at: Moment


class EventList(Answer):
    """A note's history so far."""

    events: list[Event]


class Health(Answer):
    """The process lives."""

    status: Literal["ok"]


class Part(Answer):
    """What was found about one part."""

    ok: bool
    detail: str


class Readiness(Answer):
    """Whether accepted jobs are being worked off."""

    status: Literal["ready", "not ready"]
    parts: dict[str, Part]


class Flaw(Answer):
    """One thing wrong with an input."""

    pointer: str = Field(pattern="^#", description="Where: a JSON pointer as a URI fragment (RFC 6901), such as `#/n`.")
    detail: str


class Problem(BaseModel):
    """Problem details (RFC 9457). Members that a client does not know are to be ignored."""

    type: str = Field(pattern="/problems/[a-z-]+$", description="A page that explains it.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    instance: str = Field(description="The path that was asked for.")
    request_id: str = Field(description="As in X-Request-Id.")
    errors: Maybe[Annotated[list[Flaw], Field(min_length=1, description="`invalid-input`: what is wrong, and where.")]]
    location: Maybe[Annotated[str, Field(description="`key-reused`: the job that the key stands for.")]]
    job_id: Maybe[JobId]
    kind: Maybe[Kind]
    job_status: Maybe[Literal["succeeded", "failed"]]
    finished_at: Maybe[Moment]
    expired_at: Maybe[Moment]
