"""The extension built from csrc/. Importing it registers the ops torch.ops.brorl.*."""

cuda: bool

def bfloat16_gemm() -> bool: ...
