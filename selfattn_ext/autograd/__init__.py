"""Gradients of every operator: eager, under torch.func, and in the graphs of torch.compile."""
