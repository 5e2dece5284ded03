"""What this machine has, what is missing, what mends it."""

from fuseline.doctor.check import Check, State, usable
from fuseline.doctor.examination import examine

__all__ = ["Check", "State", "examine", "usable"]
