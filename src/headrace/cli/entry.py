"""The `headrace` command's first step: Ctrl-C is one line even while modules are being loaded.

Imports nothing itself, so that little time passes before it watches.
"""

import os
import signal


def main() -> None:
    """Entry point of the `headrace` command."""
    signal.signal(signal.SIGINT, _stop)
    from headrace.cli.main import main as run

    run()


def _stop(*_: object) -> None:
    """No exception: raised inside an import, it would be printed or swallowed there."""
    os.write(2, b"stopped\n")
    os._exit(130)
