"""Attention against its peers: lengths, decode, masks, and how near the picker comes to the fastest."""
