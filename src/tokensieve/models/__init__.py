"""Models: how each family is opened (one file a family) and loaded by name (loading/)."""
