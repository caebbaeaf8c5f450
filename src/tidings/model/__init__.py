"""Pure rules: the projection of the log, who is owed what, tasks, and delivery planning. No I/O, no clock."""
