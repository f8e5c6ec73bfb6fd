"""Nouns: plain Python over SQL. Celery is unknown here, Flask lives in `api/` alone.

config       every setting, read once
clock, ids   the time, and names for rows
db, schema   the engine and `transaction()`; the tables (`migrations/` makes them)
states       the closed vocabularies and the allowed moves
errors       what can go wrong, without HTTP
kinds        what a kind of job is, and the registry of kinds
jobs, notes, outbox, deliveries, idempotency, retention
             one noun each: its rows and every move that they make
endpoints    which callback addresses may be reached
submissions  the one transaction behind a 202
status       the Redis view: the hash `job:<id>`, the relay's wake token, the workers' signs of life
logs         one JSON object a line
api/         the HTTP door
embedded     the Valkey server for development
stack        all the Procfile's lines at once (`make run`)
"""
