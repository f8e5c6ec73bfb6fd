"""Kinds that say too much, for the test of the logs."""
from __future__ import annotations

import logging
import threading
import warnings

from pydantic import BaseModel, ValidationError

from app.kinds import Job, kind


class Text(BaseModel):
    text: str


class Refusing(BaseModel):
    number: int


@kind("echo", Text)
def echo(input: Text, job: Job) -> dict[str, str]:
    """Its result is its input; says a word in the log, as any library may."""
    logging.getLogger("mycompany").warning("a word of a kind")
    warnings.warn(f"about {input.text}", stacklevel=1)
    return {"text": input.text}


@kind("blurt", Text, max_attempts=1)
def blurt(input: Text, job: Job) -> None:
    """Fails with its input in the message, in a thread of its own too."""
    def fail() -> None:
        raise LookupError(input.text)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    try:
        Refusing.model_validate({"number": input.text})
    except ValidationError:  # which tells the input
        logging.getLogger("mycompany").exception("it does not fit")
    logging.getLogger("mycompany").error("it failed", exc_info=LookupError(input.text))
    fail()
