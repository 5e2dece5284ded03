"""One loop; optimizer, schedule, checkpoints, distribution, metrics."""
