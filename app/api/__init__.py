"""The HTTP door: parse, validate, nothing else. Work is done elsewhere; the broker is unknown here."""
from app.api.application import create_app

__all__ = ["create_app"]
