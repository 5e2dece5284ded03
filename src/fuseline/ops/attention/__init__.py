"""Attention: one function for every case, its candidates, and the picker among them.

problem.py   what a call asks for, without tensors     call.py        a call, checked
reference.py the definition                            candidate.py   what a candidate is
candidates/  one file each                             limits.py      windows counted from the bottom right
choice.py    which candidate, and why                  rule.py        where nothing near was measured
tables.py    measured times                            table_store.py reads and writes them
estimate.py  what they tell of other problems          distance.py    how far problems are apart
measure.py   the times of one problem                  work.py        what it must at least do
picker.py    the public face: explain, use, forbid     attention.py   the function
draw.py      random tensors for a problem
"""
