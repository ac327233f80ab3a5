"""The command line: arguments in, files and one table out; no numerics.

`parser` says what can be written, the other modules what each command does. Nothing heavy is
imported before a command runs, so that `pbnn --help` answers at once.
"""

from collections.abc import Sequence

from pbnn.cli.messages import say, warnings_shown_once
from pbnn.cli.parser import make_parser
from pbnn.errors import PbnnError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 2 for bad input; 3 where `check` found a requirement that does not hold; 130 for Ctrl-C.

    Args:
        argv: Arguments; those of the process by default.
    """
    arguments = make_parser().parse_args(argv)
    try:
        with warnings_shown_once():
            return arguments.command(arguments) or 0
    except PbnnError as error:
        return say(f"error: {error}", 2)
    except OSError as error:
        return say(f"error: {error.filename or 'a file'}: {error.strerror or error}", 2)
    except SystemExit as error:
        # The arguments are parsed by now, so that only the code of a model can end the program.
        return say(f"error: the model file calls sys.exit({error.code}); expected no call of it", 2)
    except KeyboardInterrupt as interrupt:
        return say(f"interrupted; {str(interrupt) or 'what was finished is kept'}", 130)
