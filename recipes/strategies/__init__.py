"""Choices of ``strategy=``: torch's own ways of averaging gradients, and every preset of the package."""
