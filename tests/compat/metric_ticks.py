"""The time that goes by in the logs of metrics. Needs no vLLM. Units: ticks."""

TICKS_PER_S = 512
TICK_NS = 1_953_125  # exact, and its reciprocal is exact as a float


def ticks_before(line):
    """How much time goes by before a line of a log: mostly little, sometimes none."""
    return line * line % 7 + (60 if line % 17 == 0 else 0)
