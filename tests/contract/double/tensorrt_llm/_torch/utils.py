def get_device_uuid(device_id: int) -> str:
    return f"GPU-double-{device_id}"
