"""`python -m fused_swiglu` is `fused-swiglu`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
