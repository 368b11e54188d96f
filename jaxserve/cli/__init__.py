"""The command line: a module for each command or group of commands, and options made from configurations."""

import os
import signal

if os.getpid() == 1:
    # The kernel drops signals that the first process of a container has no handler for, so that one which comes while
    # modules are imported would be lost. A server sets its own handlers when it listens.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
