"""Device code: one file a pass, with the tiles, the softmax and the squash they share."""
