"""Structures: algebra on blocks, however they are stored."""
