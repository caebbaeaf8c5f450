"""`tidings up`: child processes, their status, and watchdogs."""
