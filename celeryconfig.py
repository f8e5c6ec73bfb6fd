"""How Celery is set up. Celery is a doorbell: no result backend, ids only, JSON only; waiting is a column in SQL."""
from app import config

_settings = config.settings()

broker_url = config.broker_url()
broker_connection_retry_on_startup = True
broker_connection_max_retries = None  # for ever: a broker that returns is used again without a restart
broker_channel_error_retry = True  # a Redis that is read-only or out of memory is a broker that is away
broker_transport_options = {"confirm_publish": True} if broker_url.startswith("amqp") else {
    "visibility_timeout": _settings.broker_visibility_timeout_seconds,
    "socket_timeout": 5,  # a consumer asks for a second at a time; what takes longer has died silently
    "socket_connect_timeout": 2,  # then the next try, a second later
    "socket_keepalive": True,
    "health_check_interval": 10,  # a consumer that hangs is free again within twice that, before a lease is over
}

imports = (
    "tasks.relay_outbox", "tasks.run_job", "tasks.run_in_turn", "tasks.run_together", "tasks.deliver_webhook",
    "tasks.rescue_stalled", "tasks.prune_expired", "tasks.stopping",
)
task_serializer = "json"
accept_content = ["json"]
task_ignore_result = True
result_backend = None
task_default_queue = "q:jobs2"
worker_send_task_events = True

worker_consumer = "tasks.broker:Reconnecting"
beat_scheduler = "tasks.broker:Clock"
worker_concurrency = _settings.worker_concurrency
worker_prefetch_multiplier = 1  # with late acknowledgement: a short job never waits behind a long one
# A kind that leaks 10 kB a message, which may name several short jobs, is held to 100 MB; one fork in so many counts
# nothing.
worker_max_tasks_per_child = 10_000
worker_hijack_root_logger = False
worker_redirect_stdouts = False
worker_cancel_long_running_tasks_on_connection_loss = False  # SQL decides whether an attempt still counts

enable_utc = True
timezone = "UTC"
# Without `expires`, which compares two machines' clocks: the beat sends no tick while some wait (`tasks.broker.Clock`).
beat_schedule = {
    "relay": {
        "task": "tasks.relay_outbox",
        "schedule": _settings.relay_interval_seconds,
        "options": {"queue": "relay"},
    },
    "rescue": {
        "task": "tasks.rescue_stalled",
        "schedule": _settings.rescue_interval_seconds,
        "options": {"queue": "relay"},
    },
    "prune": {
        "task": "tasks.prune_expired",
        "schedule": _settings.prune_interval_seconds,
        "options": {"queue": "relay"},
    },
}
