"""A session of onnxruntime with operators of ours, through its C interface.

``functions`` is the interface, ``session`` loads and runs a model, ``operators`` are called back.
"""
