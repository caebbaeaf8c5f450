"""The command line. Standard output is data, standard error is words; exit codes are those of `errors.py`."""
