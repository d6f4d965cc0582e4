"""What stands in blocks, if each request writes what it computes.

Owns: the content by block. A token's KV depends on all tokens before it, so a block holds a whole prefix per token; a
block of a recurrent group the one whose state it is. Always: a wrong hit, a block of two requests, one that was let go
too early, a copy that was not made: all show as a prefix that is not the reader's. Units: tokens, blocks.
"""

from dataclasses import dataclass

from kvtier.cache.specs import ChunkedLocal, CrossAttention, Mamba, SlidingWindow

GARBAGE = "garbage"


@dataclass
class Step:
    """What a batch computes of one request: tokens [start, end), the last of which are `drafts`.

    lookahead: slots behind them that are written to. loaded_from: tokens from here to `start` come from elsewhere.
    """

    start: int
    end: int
    drafts: list
    lookahead: int = 0
    accepted: int = 0
    loaded_from: int | None = None


@dataclass
class Row:
    """One request's part of a batch: all its tokens, drafts included, and its tables."""

    name: str
    tokens: list
    tables: tuple
    step: Step


def first_read(spec, position):
    """The first token that the token at `position` looks at."""
    if isinstance(spec, SlidingWindow):
        return max(0, position - spec.window + 1)
    return position // spec.chunk_tokens * spec.chunk_tokens if isinstance(spec, ChunkedLocal) else 0


class Content:
    """By block: its group, and a list of prefixes or the prefix of a state."""

    def __init__(self, specs):
        self.specs = specs
        self.by_block = {}

    def copy(self, copies):
        """In this order: one may read what another has written."""
        for source, target in copies:
            self.by_block[target] = self.by_block.get(source)

    def damage(self, blocks):
        self.by_block |= dict.fromkeys(blocks, GARBAGE)

    def load(self, tokens, tables, start, end):
        """What comes from elsewhere goes into all blocks that are there for it."""
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if isinstance(spec, Mamba):
                self.by_block[table[(end - 1) // spec.block_tokens]] = (group, tuple(tokens[:end]))
                continue
            for position in range(start, end):
                if table[position // spec.block_tokens]:
                    self._put(group, table, position, tuple(tokens[: position + 1]))

    def compute(self, rows, expect_own):
        """Read the states; write all KV, then read it, as layers do; write the states.

        expect_own(name, group, block) is called before a block is written to.
        """
        states = [group for group, spec in enumerate(self.specs) if isinstance(spec, Mamba)]
        others = [group for group, spec in enumerate(self.specs) if not isinstance(spec, Mamba | CrossAttention)]
        for work, groups in (
            (self._read_state, states),
            (self._write_kv, others),
            (self._read_kv, others),
            (self._write_state, states),
        ):
            for row in rows:
                for group in groups:
                    for block in work(row, group, row.tables[group]) or ():
                        expect_own(row.name, group, block)

    def _write_kv(self, row, group, table):
        size, step, written = self.specs[group].block_tokens, row.step, set()
        for position in range(step.start, step.end + step.lookahead):
            assert position < len(table) * size, f"no slot for token {position} of {row.name}"
            block = table[position // size]
            assert block, f"nothing to write token {position} of {row.name} into"
            written.add(block)
            self._put(group, table, position, tuple(row.tokens[: position + 1]) if position < step.end else GARBAGE)
        return written

    def _put(self, group, table, position, prefix):
        size = self.specs[group].block_tokens
        block = table[position // size]
        kept = self.by_block.get(block)
        same = kept is not None and kept[0] == group and isinstance(kept[1], list)
        prefixes = list(kept[1]) if same else [GARBAGE] * size  # a copy's list is another one
        prefixes[position % size] = prefix
        self.by_block[block] = (group, prefixes)

    def _read_kv(self, row, group, table):
        spec, start = self.specs[group], row.step.start
        for position in range(first_read(spec, start), start):
            kept = self.by_block.get(table[position // spec.block_tokens])
            right = kept is not None and kept[0] == group and isinstance(kept[1], list)
            right = right and kept[1][position % spec.block_tokens] == tuple(row.tokens[: position + 1])
            assert right, f"{row.name}, group {group}: token {position} of {table} finds {kept}"

    def _read_state(self, row, group, table):
        if row.step.start:
            kept = self.by_block.get(table[(row.step.start - 1) // self.specs[group].block_tokens])
            right = kept == (group, tuple(row.tokens[: row.step.start]))
            assert right, f"{row.name}, group {group}: the state at {row.step.start} of {table} is {kept}"

    def _write_state(self, row, group, table):
        spec, step = self.specs[group], row.step
        last = (step.end - 1) // spec.block_tokens
        ends = {last: step.end}
        if spec.mode == "all":
            ends |= {i: (i + 1) * spec.block_tokens for i in range(step.start // spec.block_tokens, last)}
        ends |= dict.fromkeys(range(last + 1, last + 1 + spec.speculative_blocks))  # drafts, all rejected
        for i, end in ends.items():
            assert table[i], f"nothing to write state {i} of {row.name} into"
            self.by_block[table[i]] = GARBAGE if end is None else (group, tuple(row.tokens[:end]))
        return [table[i] for i in ends]
