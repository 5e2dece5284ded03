"""Attention: one function for every case, its candidates, and the picker among them.

problem.py   what a call asks for, without tensors     call.py        a call, checked
reference.py the definition                            candidate.py   what a candidate is
candidates/  one file each                             limits.py      windows counted from the bottom right
choice.py    which candidate, and why                  rule.py        where nothing near was measured
tables.py    measured times, neighbours                kept.py        where tables lie
picker.py    the public face: explain, use, forbid     attention.py   the function
"""
