"""Tools to test distributed code on one machine: run a function on several ranks, and compare the results.

    from fullshard.testing import assert_same, run_ranks

    def train(strategy: str) -> dict[str, Tensor]: ...  # at the top level of a file, so that ranks can import it

    def test_strategies_agree():
        for ranks in zip(run_ranks(2, train, "ddp"), run_ranks(2, train, "zero3")):
            assert_same(*ranks)

`check_parity` compares sharded training of a model with plain training:

    check_parity(make_model, make_batch, ranks=2).raise_if_different()

Every call starts new processes, so tests do not affect each other through process groups, hooks or random state. The
processes are forked from a server that has imported torch: two ranks take less than a tenth of a second to start.
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
