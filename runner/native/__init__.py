"""onnxruntime by its C interface: sub-sessions and kernels share the threads of one pool."""
