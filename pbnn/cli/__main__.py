"""`python -m pbnn.cli`: the command line."""

import sys

from pbnn.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
