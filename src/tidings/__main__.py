"""`python -m tidings`: the command line."""

import sys

from tidings.cli.main import main

sys.exit(main())
