"""Where autopar meets other libraries: model loading, tracing quirks."""
