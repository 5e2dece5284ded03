"""Drop-in modules over the ops."""
