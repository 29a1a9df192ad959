"""Exact attention: one public op, its mask, and the reference it is held to."""

from pallas_kernels.attention.api import CONTEXT, LSE, attention, attention_backward
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.reference import attention_reference

__all__ = ["CONTEXT", "LSE", "Mask", "attention", "attention_backward", "attention_reference"]
