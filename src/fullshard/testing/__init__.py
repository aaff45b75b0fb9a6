"""Tools for testing distributed code on one machine: run a function on several ranks, and compare the results.

    from fullshard.testing import assert_same, run_ranks

    def train(strategy: str) -> dict[str, Tensor]: ...          # at the top of a file, so that a rank can import it

    def test_strategies_agree():
        for ranks in zip(run_ranks(2, train, "ddp"), run_ranks(2, train, "zero3")):
            assert_same(*ranks)

and whether a whole model trains sharded as it trains plain:

    check_parity(make_model, make_batch, ranks=2).raise_if_different()

Every call starts fresh processes, so nothing leaks from one test into the next: no process group, no hook, no random
state. They are forked from a server that has imported torch beforehand: two ranks cost less than a tenth of a second.
"""

from fullshard.testing.parity.check import check_parity
from fullshard.testing.parity.parallel import Parallelism
from fullshard.testing.parity.report import ParityReport, ParityRow
from fullshard.testing.ranks import RankFailure, RanksFailed, run_ranks
from fullshard.testing.same import assert_same

__all__ = [
    "Parallelism",
    "ParityReport",
    "ParityRow",
    "RankFailure",
    "RanksFailed",
    "assert_same",
    "check_parity",
    "run_ranks",
]
