"""The worker that carries messages between two spaces."""
