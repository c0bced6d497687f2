"""torchrun that leaves with the exit status of the rank that failed first, where torchrun itself always leaves with 1.

The arguments are torchrun's.
"""

from __future__ import annotations

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: list[str]) -> int:
    """Runs torchrun and returns the exit status for this process; a rank that a signal ended counts as 128 + signal."""
    try:
        run.main(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
