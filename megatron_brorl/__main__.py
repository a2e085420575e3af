"""Entry point of `brorl`, and of `python -m megatron_brorl`, which torchrun starts."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line, even while modules are imported."""
    try:
        from megatron_brorl.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("\nbrorl: interrupted", file=sys.stderr, flush=True)
        # A process that ends by the signal also ends a loop of its shell, and waits for no thread.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
