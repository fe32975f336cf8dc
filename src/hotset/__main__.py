"""`python -m hotset` is `hotset`."""

from hotset.cli.main import main

main()
