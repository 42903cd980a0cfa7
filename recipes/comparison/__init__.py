"""Several runs side by side: planning, running, reading back, drawing."""
