"""Writes random stateful programs at the level of the IR."""
