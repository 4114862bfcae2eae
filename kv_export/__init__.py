"""Artifacts of a loaded model for other runtimes: ONNX and StableHLO. Nothing is exported yet."""
