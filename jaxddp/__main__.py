"""`python -m jaxddp`, the same as `jaxddp`."""

import sys

from jaxddp.cli import main

sys.exit(main())
