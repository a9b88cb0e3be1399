"""Built-in adapters of the conformance kit, one module per library."""
