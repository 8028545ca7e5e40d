"""S-Part: every layer with weights, on rank 0."""
