"""What `spark-submit` is given to run delivery on a Spark it chose: the options of `process.py` follow.

    spark-submit --master M --archives tidings.tar.gz#tidings_env tidings_env/tidings/delivery/submit.py --home H ...

Master, memory and every other setting of Spark are spark-submit's to say. It runs in client mode: the driver is here,
where the space's `space.toml` and credential are. `tidings pipeline package` builds the archive and prints the command.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of the script first: modules beside this one would hide others of the same name
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]
    from tidings.delivery.process import end, main

    end(main())
