"""The callback receiver for development: verifies, logs, and misbehaves on request. It shares no code with what it
receives from.

signature   Standard Webhooks 1.0, from the receiver's side
journal     hook.log
server      the routes
"""
