"""Running nats-server: configuration, accounts, credentials, streams, certificates, leases and the state bucket."""
