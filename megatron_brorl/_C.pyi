"""The extension built from csrc/. Importing it registers the ops torch.ops.brorl.*."""

cuda: bool

def has_bfloat16_kernel() -> bool: ...
