"""Arithmetic on addresses and arrays: knows no ONNX, no plans, no errors of ours."""
