"""Models that are audited: what answers an attack."""
