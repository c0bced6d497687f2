"""Programs around training."""
