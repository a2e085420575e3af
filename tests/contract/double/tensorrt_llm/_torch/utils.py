def get_device_uuid(device_idx: int) -> str:
    return f"GPU-double-{device_idx}"
