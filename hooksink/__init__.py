"""The callback receiver for development: verifies, logs, and misbehaves on request. It shares no code with what it
receives from.

signature     Standard Webhooks 1.0, from the receiver's side
journal       hook.log
misbehaviour  what a path asks for beside the usual answer
received      the latest hooks, in memory
page          what `GET /` shows of them
server        the routes
"""
