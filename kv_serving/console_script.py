"""What `jaxkv` runs first: Ctrl-C ends the process from its first moment, also while the rest is being imported.

Contract: it imports nothing but the standard library, and the command that it hands over to takes Ctrl-C back.
"""

import signal


def main() -> None:
    """The console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as behind nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kv_serving.cli import main as run

    run()
