"""The runtime: synchronization with a device, precision, CUDA graphs, and walks through nested containers."""
