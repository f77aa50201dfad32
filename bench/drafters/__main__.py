"""python -m bench.drafters: the command without the others, for machines that have little more than torch."""

import sys

from bench.drafters.command import main

main(sys.argv[1:])
