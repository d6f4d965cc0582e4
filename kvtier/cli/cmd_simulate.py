"""`kvtier simulate`: recorded requests replayed against policies, or against whole sets of tiers.

With one tier (`--capacity`) each run is a policy and a size, with `--tiers FILE` a policy on all tiers of the file (or
the file's own policies). Runs share the cores. What was wrong in the options or the trace ends with code 2.

JSON, one object a line (keys are stable):
    one tier   trace, policy, capacity_blocks, accesses, hits (blocks), prefix_tokens, input_tokens, prefix_hit_rate,
               seconds (of one core); where they are not the usual ones order, and hinted (which hints the policy used)
    tiers      the fields of `ReplayReport`, `tiers` those of `TierReport`; growth [{tier, more_bytes, prefix_hit_rate,
               gain_per_gb, ttft_p50_s}]
"""

import sys
from pathlib import Path

from kvtier.cli import stopping
from kvtier.cli.simulate import asked
from kvtier.cli.simulate.asked import Options
from kvtier.sim.reading import read_trace
from kvtier.sim.trace import Trace


def simulate(file: Path, options: Options, json_output: bool) -> int:
    """Run what was asked for; returns the exit code. Raises KvtierError for what cannot be simulated."""
    asked.check_combination(options)
    asked.check_plot(options.plot)
    policies = asked.policies_of(options)
    block_tokens = asked.block_tokens_of(options)
    if options.tiers is None:
        from kvtier.cli.simulate import one_tier

        order, trace = asked.order_of(options), _read(file, block_tokens)
        with stopping.tidily():
            one_tier.show(trace, policies, order, options, json_output)
    else:
        from kvtier.cli.simulate import several_tiers

        trace = _read(file, block_tokens)
        with stopping.tidily():
            several_tiers.show(trace, policies, options.tiers, options, json_output)
    return 0


def _read(file: Path, block_tokens: int | None) -> Trace:
    """Read it, and say what makes its figures doubtful."""
    trace = read_trace(file, block_tokens)
    if trace.strayed:
        print(
            f"warning: {file}: {len(trace.strayed)} of {len(trace.requests)} requests (the first is number "
            f"{trace.strayed[0] + 1}) name a block behind another than before. A name must tell all that lies before "
            "its block; else what is found could not be used",
            file=sys.stderr,
        )
    return trace
