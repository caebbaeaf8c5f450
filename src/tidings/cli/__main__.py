"""`python -m tidings.cli` is `tidings`."""

import sys

from tidings.cli.main import main

sys.exit(main())
