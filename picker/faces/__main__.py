"""`python -m picker.faces DESCRIPTOR`: a face, started by the core and by nobody else."""

import sys

from picker.faces.child import main

main(int(sys.argv[1]))
