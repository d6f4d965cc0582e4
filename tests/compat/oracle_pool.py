"""What can be seen of vLLM's pool after an operation, common to all logs."""

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

HASH = get_hash_fn_by_name("sha256_cbor")
init_none_hash(HASH)


class InsertionOrder(dict):
    """Block -> its further hashes. vLLM keeps them in sets of bytes, whose order Python draws anew in each process;
    here they leave in the order they came, which is one of the orders that a set may have."""

    class Hashes(dict):
        def add(self, block_hash):
            self[block_hash] = None

    def setdefault(self, block, _empty):
        return super().setdefault(block, self.Hashes())


def request_of(id, tokens, hash_tokens, **identity):
    """A waiting request. identity: what else its block hashes depend on."""
    sampling = SamplingParams(max_tokens=64, temperature=0)
    hasher = get_request_block_hasher(hash_tokens, HASH)
    return Request(id, list(tokens), sampling, None, block_hasher=hasher, **identity)


def cached(manager):
    """Block -> the beginning of its hash."""
    return {b.block_id: b.block_hash.hex()[:12] for b in manager.block_pool.blocks if b.block_hash}


def ids(blocks):
    """Block ids per group; None stays None."""
    return None if blocks is None else [list(group) for group in blocks.get_block_ids()]


def snapshot(manager, running, event_text):
    """Block tables, reuse order, holders and cache as they are, and the events since the last snapshot."""
    pool = manager.block_pool
    return {
        "table": {id: [list(group) for group in manager.get_block_ids(id)] for id in running},
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "nfree": pool.get_num_free_blocks(),
        "refs": {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt},
        "cached": cached(manager),
        "events": [event_text(event) for event in manager.take_events()],
    }


def event_text(event):
    """An event with its group, parent and hashes, as a log has it."""
    name = type(event).__name__
    hashes = ",".join(map(str, getattr(event, "block_hashes", None) or []))
    if name == "BlockStored":
        parent = "-" if event.parent_block_hash is None else event.parent_block_hash
        return f"{name}:{event.group_idx}:{parent}:{event.block_size}:{hashes}"
    if name == "BlockRemoved":
        return f"{name}:{event.group_idx}:{hashes}"
    return f"{name}:"
