"""`python -m hdet.lab` is `hdet`."""

import sys

from hdet.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
