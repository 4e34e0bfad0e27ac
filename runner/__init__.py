"""Executes a plan on storage of the caller, step by step."""
