"""Files that are written whole or not at all, and the dotted paths that files store in place of classes."""
