"""An offloading spec for vLLM 0.32: its blocks go to kvtier's host memory and disk. See docs/vllm.md."""

from kvtier.integrations.vllm.spec import KvtierOffloadingSpec

__all__ = ["KvtierOffloadingSpec"]
