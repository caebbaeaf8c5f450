"""The broker: starting nats-server, its configuration, its streams, and who may do what on it.

Nothing here knows what a membership or a message means; that is `space/`. Everything here is about the server: a
space is one nats-server with an operator, a system account, and the two accounts CORE and AGENTS.
"""
