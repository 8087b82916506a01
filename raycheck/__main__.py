"""``python -m raycheck``: the command line where its script is not on the PATH."""

from raycheck.cli import main

main()
