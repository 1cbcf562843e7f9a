"""Reading and writing files: text with line numbers, outputs that replace only autopar's files, scratch folders."""
