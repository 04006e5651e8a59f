"""`python -m picker`."""

from picker.cli import main

main()
