# Faults inside vLLM itself: a plugin that vLLM loads in each of its processes.
#
# This folder is put on PYTHONPATH of a server, and VLLM_FAULT names the fault.  It runs in vLLM's
# environment, without Servanda.

import os


def inject():
    if name := os.environ.get("VLLM_FAULT"):
        FAULTS[name]()


def swapped_blocks():
    """A prefix-cache hit returns its last two blocks in the wrong order."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

    found = KVCacheManager.get_computed_blocks

    def changed(self, request):
        blocks, *rest = found(self, request)
        groups = tuple([*g[:-2], *reversed(g[-2:])] for g in blocks.blocks)
        return KVCacheBlocks(groups) if any(groups) else blocks, *rest

    KVCacheManager.get_computed_blocks = changed


def foreign_block():
    """A prefix-cache hit returns the first block of the prefix in the place of its last one."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

    found = KVCacheManager.get_computed_blocks

    def changed(self, request):
        blocks, *rest = found(self, request)
        groups = tuple([*g[:-1], g[0]] if len(g) > 1 else [*g] for g in blocks.blocks)
        return KVCacheBlocks(groups) if any(groups) else blocks, *rest

    KVCacheManager.get_computed_blocks = changed


def leaking_row():
    """In a batch, the first request's logits take a part of those of the last one."""
    _on_logits(lambda logits: logits[0].lerp_(logits[-1].clone(), 0.1))


def temperature_by_batch():
    """Logits are scaled by the number of requests of a step."""
    _on_logits(lambda logits: logits.mul_(1 - 0.01 * (len(logits) - 1)))


def _on_logits(change):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    forward = LogitsProcessor.forward

    def changed(self, *args, **kwargs):
        logits = forward(self, *args, **kwargs)
        if logits is not None and len(logits) > 1:
            change(logits)
        return logits

    LogitsProcessor.forward = changed


def lost_slot():
    """The last token of each block is written to the slot before it, where decoding begins it."""
    from vllm.v1.worker.block_table import BlockTable

    mapped = BlockTable.compute_slot_mapping

    def changed(self, num_reqs, query_start_loc, positions):
        mapped(self, num_reqs, query_start_loc, positions)
        if positions.shape[0] == num_reqs:  # a step that decodes alone
            last = positions % self.block_size == self.block_size - 1
            self.slot_mapping.gpu[: positions.shape[0]] -= last.to(self.slot_mapping.gpu.dtype)

    BlockTable.compute_slot_mapping = changed


FAULTS = {
    fault.__name__: fault
    for fault in (swapped_blocks, foreign_block, leaking_row, temperature_by_batch, lost_slot)
}
