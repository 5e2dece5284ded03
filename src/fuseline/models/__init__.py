"""Small readable models; presets are data."""
