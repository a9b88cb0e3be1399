"""How the conformance kit asks other libraries for their factors, one module per library."""
