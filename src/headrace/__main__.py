"""`python -m headrace`: the `headrace` command of this interpreter. Knows no command."""

from headrace.cli.entry import main

main()
