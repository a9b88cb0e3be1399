"""The tour: runs every definition, verifies its claims, and writes one HTML report that stands alone."""
