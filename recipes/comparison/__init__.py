"""Several runs side by side: planning them, running them, reading their results, and drawing them."""
