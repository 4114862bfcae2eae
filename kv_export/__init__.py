"""Artifacts of a loaded model for other runtimes: ONNX and StableHLO. May import every layer below, never kv_serving."""
