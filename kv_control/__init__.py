"""The host control plane: which page of the pool holds what, and what one step may touch.

Standard library, numpy and `kv_common` only. Nothing here loops in Python over tokens or pages, and the device is never
touched: the execution layer is told what to do by one `KvPageTableV1` a step.
"""
