"""A greenhouse, as an example of somebody else's package."""
