"""Write the digits of the demo; `jaxddp data sample digits --out DIR` does the same.

python launch/digits.py data/digits
"""

import sys

from jaxddp.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "sample", "digits", "--out", *sys.argv[1:]]))
