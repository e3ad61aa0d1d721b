"""Backends: who moves the rows and runs the down projection."""
