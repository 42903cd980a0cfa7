"""Where samples come from: files, caches, downloads, stand-ins, and the batches made of them."""
