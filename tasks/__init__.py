"""Verbs: what Celery's processes do to the nouns of `app`. Nothing is imported here, so that the API can load a kind
without Celery.

celery            the Celery app, its processes' logs and signs of life
relay_outbox      what is handed over, or claimed, is published and marked (`publishing`: the only door to the broker;
                  `sharing`: which rows share a message)
run_job           one attempt of one job (`attempt`, `heart` and `interrupting` serve it)
run_in_turn       the first attempts of several short jobs of a message, one after another
run_together      the first attempts of several short jobs, in one transaction
deliver_webhook   one attempt of one delivery (`egress`, `deadlines`, `answers`, `reasons`, `signature`, `spreading` and
                  `threads` serve it), and those that follow it (`going_on`)
rescue_stalled    leases that ran out, messages that got lost (`republishing`)
prune_expired     past the time to live
broker, stopping  Celery's consumer, clock and channel, made to last; the end of a worker
primes, history   the built-in kinds
"""
