"""How every command of the package ends that a person or a pipe cuts off."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

INTERRUPTED, CLOSED = 128 + 2, 128 + 13  # what shells make of SIGINT and SIGPIPE


def run(main: Callable[[], int], name: str) -> int:
    """The exit status of ``main``; Ctrl-C and a closed pipe end it without a trace.

    name: of the command, for the line that Ctrl-C gives.
    """
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Else Python writes what is left once more, at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    return status
