"""`python -m hdet.lab` is `hdet`."""

import sys

from hdet_command import main

if __name__ == "__main__":
    sys.exit(main())
