"""The library for programs: `tidings.connect`, the endpoint and its receive path, tasks, and the client of the host."""
