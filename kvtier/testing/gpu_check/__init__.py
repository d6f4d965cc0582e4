"""What the tests cannot know without a card, measured on one: ``python -m kvtier.testing.gpu_check --json OUT``.

One file per part; `parts` lists them, `command` runs them, each in a process of its own. Always: what could not be
measured is said with its reason, and nothing is estimated.
"""
