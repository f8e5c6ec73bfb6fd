"""What people would use instead: each as its own documentation suggests, as small as that, and doing the same work.

`POST /jobs {"n": 5}` answers 202 with a `job_id`; `GET /jobs/<id>` answers with the status in the library's own words,
and with the result once there is one. Stores are given as REDIS_URL, RESULTS_URL, SQLITE_FILE or POSTGRES_DSN.
"""
