"""Nouns: plain Python over SQL. Celery is unknown here, Flask lives in `api/` alone.

config       every setting, read once
clock, ids, ports, backoff
             the time, names for rows, whether a port is free, when the next try is due
db, schema   the engine and `transaction()`; the tables (`migrations/` makes them)
statements   prebuilt statements, handed to the driver
gathering, group_commit
             who comes at the same time acts together; writers share a transaction
turnstile    the queue of a SQLite file's writers
states       the closed vocabularies and the allowed moves
errors       what can go wrong, without HTTP
kinds        what a kind of job is, and the registry of kinds
ownership    whose job it is, and what became of one that is gone
jobs, notes, outbox, deliveries, idempotency, retention
             one noun each: its rows and every move that they make
at_once      moves of several jobs that share a transaction
addresses    which callback addresses may be reached
circuits, turns, slices, joining
             how endpoints answer lately, whose callback a host gets next, who goes on in its place, who needs no
             message
excerpts     what receivers said, made safe to show
rounds       rounds of callbacks that have ended (`python -m app.redeliver` asks for more)
submissions  the one transaction behind a 202
interventions
             what a client may still ask of a job: cancel it, tell its end once more
pages        the lists, newest first
outlook, forecast
             how long a job has to wait, how large the backlog is
status       the Redis view: the hash `job:<id>`; readers share a round trip
waking       the relay's wake tokens, with what was committed
redis_client this process's connections to Redis
presence     which workers and couriers are alive, and when the relay last ran
signing      the secrets that callbacks are signed with
logs         one JSON object a line
metrics, gauges, slots
             what is counted, and what is true at a scrape; the places of the files
api/         the HTTP door
doctor, invariants
             whether SQL, Redis and the broker agree (`make doctor`)
embedded     the Valkey server for development
stack, supervisor
             all the Procfile's lines at once (`make run`)
"""
