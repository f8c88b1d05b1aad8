"""What callers give, checked and brought into the form of the operators."""
