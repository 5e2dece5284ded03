"""What this machine has, what is missing, what mends it."""
