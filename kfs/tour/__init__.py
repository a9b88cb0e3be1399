"""The tour: runs every definition, verifies its claims, and writes one self-contained HTML report."""
