"""Records in, one HTML page and PNG files out."""
