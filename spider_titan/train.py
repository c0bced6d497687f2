"""The command: reads the configuration, builds the trainer, runs it.

Exit status: 0 done, 2 the user's mistake, 1 anything else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from spider_titan.config import load_config, to_toml
from spider_titan.console import setup_console
from spider_titan.distributed import join_world
from spider_titan.run_directory import DiskError
from spider_titan.trainer import Trainer

# Run as a program this module is called "__main__", which is outside the package's logger.
logger = logging.getLogger("spider_titan.train")

USER_MISTAKE = 2
FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Runs a training and returns the exit status.

    What a user can cause ends with one line; anything else is a bug and raises.
    """
    setup_console()
    try:
        config = load_config(arguments)
    except ValueError as error:
        logger.error("%s", error)
        return USER_MISTAKE
    with join_world(config.parallelism, config.comm) as world:
        setup_console(rank=world.rank)
        try:
            try:
                trainer = Trainer(config, to_toml(config), world)
            except ValueError as error:
                logger.error("%s", error)
                return USER_MISTAKE
            trainer.train()
        except DiskError as error:
            logger.error("%s", error)
            return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
