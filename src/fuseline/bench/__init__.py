"""Ladder, suites and peers."""
