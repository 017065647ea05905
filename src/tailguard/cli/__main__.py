"""`python -m tailguard.cli`."""

from tailguard.cli import main

main()
