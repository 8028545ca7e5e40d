"""R-Part: decode attention over one KV partition on a CPU; no torch."""
