"""`python -m hdet_lab` is `hdet`."""

import sys

from hdet_lab.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
