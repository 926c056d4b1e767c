"""`python -m kvjax` is the command line, too."""

import sys

from kvjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
