"""The launcher of the ranks of a run on this machine, for runs without torchrun."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard._compat import killed_after
from fullshard.train.ranks import cores_of_machine

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended


def launch(module: str, argv: Sequence[str], ranks: int, *, patience_s: int = 5) -> int:
    """Run `python -m module argv` as `ranks` ranks of one process group on this machine and return the exit code.

    The exit code is 0 if all ranks succeed, else that of the rank that failed first. Ctrl-C and SIGTERM end all ranks
    without output. Ranks that do not end within `patience_s` seconds are killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores_of_machine() // ranks)))
    # The launcher logs every failing rank at length; the rank has already reported its error.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with killed_after(patience_s) as patience:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                **patience,
            )
            elastic_launch(config, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode) or 1
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED
    finally:
        logging.disable(disabled)
    return 0
