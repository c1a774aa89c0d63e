"""Start a command that cannot outlive its parent: `python tether.py PARENT_PID COMMAND ARG…`.

The kernel kills the command when the parent ends, however it ends, so a killed `cacheaware up` leaves no engine behind.
A script of its own instead of a hook between fork and exec: the parent has threads, and running Python code in a forked
copy of it could deadlock. Standard library only, and few modules of it: it runs before every part.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"could not tie {command[0]} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the tie was made
        sys.exit("the process that started this one has ended")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"could not start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(2)  # as a bad setting: trying again would not help


if __name__ == "__main__":
    main()
