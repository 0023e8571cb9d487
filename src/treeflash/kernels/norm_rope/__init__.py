"""Norms and rotary embedding."""

from treeflash.kernels.norm_rope.reference import l2_norm, rms_norm, rope, rope_angles

__all__ = ["l2_norm", "rms_norm", "rope", "rope_angles"]
