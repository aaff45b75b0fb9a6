"""`python -m fullshard.cli`, for launchers such as torchrun that take a module."""

import sys

from fullshard.cli import main

sys.exit(main())
