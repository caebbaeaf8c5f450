"""The host: one process on a machine that sends and receives for the agents on it.

Short-lived programs hand it what they send, and it keeps what they are sent: being offline is normal. Its outbox and
inbox are one SQLite file; sending and receiving go through one endpoint per agent.
"""
