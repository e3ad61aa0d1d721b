"""What ``launch/bench.py`` times: one module a sub-command, each with the same two functions.

``add_arguments(parser)`` adds the sub-command's own flags. ``run(args)`` yields records, each a
mapping of JSON-able fields; it runs on every rank, and rank 0's are written as soon as they come.
``records.py`` has what records and flags are made of, ``ranks.py`` the ranks, ``clock.py`` their
clocks.
"""
