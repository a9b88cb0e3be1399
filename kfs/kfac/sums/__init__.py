"""Running sums over data: outer products, and statistics of per-datum gradients."""
