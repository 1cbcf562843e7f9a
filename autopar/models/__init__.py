"""Models by name, from Python files and Hugging Face folders: loading, batches, export."""
