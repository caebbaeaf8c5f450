"""Carries requests and answers of the contract over NATS and a unix socket."""
