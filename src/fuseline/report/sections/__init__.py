"""One file a suite: from its records to a section of the page."""
