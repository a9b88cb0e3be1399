"""Files and checkpoints."""
