"""The problem: a model, a loss, data and parameters as one object, and the protection of the user's state."""
