"""Models and data of other libraries: loading, batches, export."""
