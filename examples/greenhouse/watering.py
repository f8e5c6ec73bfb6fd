"""The kind `watering`: waters the beds of a greenhouse one after the other."""
from pydantic import BaseModel, Field

from app.kinds import Refused, kind


class Watering(BaseModel):
    """Which beds, and how much for each."""

    beds: int = Field(ge=1, le=100)
    litres: float = Field(default=1.5, gt=0)
    crop: str = "tomatoes"


@kind("watering", Watering, max_attempts=2, time_limit=60)
def watering(input: Watering, job) -> dict:
    """Waters every bed; cacti are refused, since no second attempt would make them thirsty."""
    if input.crop == "cacti":
        raise Refused("cacti want no water")
    poured = 0.0
    for bed in range(input.beds):
        if job.cancelled():
            break
        poured += input.litres
        job.progress(bed + 1, input.beds)
    return {"beds": input.beds, "litres": poured, "attempt": job.attempt}
