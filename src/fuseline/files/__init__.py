"""Files that others wrote, read with suspicion; and our own, written so that nobody sees half of one.

Everything read from a file passes through here: only regular files are opened, sizes are known before
anything is read, JSON is finite and shallow, and a schema says what each value may be.
"""
