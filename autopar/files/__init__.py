"""Reading and writing files: text with its lines, outputs that are only ours to replace, scratch folders."""
