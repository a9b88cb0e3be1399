"""Capture: seeing the operations of a forward pass that use tracked parameters."""
