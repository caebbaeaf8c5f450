"""The host daemon: one per user and machine, so that short-lived programs send and receive without a connection.

What a program hands over is kept before it is answered and leaves when the space can be reached; what arrives for an
agent is kept until the agent reads it. Nothing here is needed by a program that holds an endpoint of its own.
"""
