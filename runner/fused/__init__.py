"""Fused steps: a table of instructions for one call, in place of many calls of a library.

``table`` collects instructions and buffers, ``templates`` and the modules of operators beside it
write them, ``region`` runs them. A table belongs to a frame: one binding, one tuple of shapes.
"""
