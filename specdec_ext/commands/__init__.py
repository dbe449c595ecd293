"""What ``python -m specdec_ext <command>`` runs.

One file a command, each with two functions: ``add_arguments(parser)`` declares its options, and
``run(args)`` does the work and returns the exit status. What they share is the frame: `frame` has
the options that several commands take, their checks, and what is printed where a command cannot
run; `pair` loads a target, its draft and the prompts; `page` writes text to a terminal or a file.
"""
