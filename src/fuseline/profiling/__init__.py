"""Where the time of a step goes: by kind of work and by kernel against their floors, in gaps, in memory."""

from fuseline.profiling.difference import Change, Difference, difference, gained
from fuseline.profiling.profile import Profile
from fuseline.profiling.session import Session
from fuseline.profiling.step import profile_step

__all__ = ["Change", "Difference", "Profile", "Session", "difference", "gained", "profile_step"]
