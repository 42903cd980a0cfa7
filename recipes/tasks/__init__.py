"""What a network is trained for: loss, metric, optimizer and learning-rate schedule."""
